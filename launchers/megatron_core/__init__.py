"""Our own trial program on megatron-core. The only place that imports `megatron`."""
