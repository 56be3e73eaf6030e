"""Kubernetes manifests of a run, and their submission to an API server: the parts of `megalite k8s`.

parsing     command-line texts (names, quantities, claims, variables) -> checked values
job         properties that all kinds of jobs share; the config with paths inside pods; objects -> YAML
pod         a job -> the pod template of its nodes, the ConfigMap with its config, and restart policies by exit code
resources   a job -> the objects of one kind; a new kind needs a function there and a line in launch/cli/kubernetes.py
validate    offline validation against the models of kubeflow-trainer-api
cluster     an API server: dry runs, creation of all objects or none, and what its refusals mean
"""
