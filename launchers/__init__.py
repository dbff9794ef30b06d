"""How one trial runs on one node. Knows no Ray, Optuna or MLflow. Standard library only: ranks import this package too."""
