"""Cannot be imported."""

raise ImportError("this pool lacks something")
