"""The service: studies driven by Ray Tune and Optuna, telemetry, MLflow records, the command line."""
