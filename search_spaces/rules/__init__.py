"""Megatron's rules by subject. A rule looks at many configurations at once, so one implementation serves a check and a table."""
