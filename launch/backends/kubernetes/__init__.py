"""Manifests of a run for Kubernetes, and handing them to an API server: what `megalite k8s` is made of.

words       what users type (names, quantities, claims, variables) -> checked values
job         all that the kinds have in common, as one value
paths       a config -> the same config with the paths that pods see
pod         a job -> the pod template of its nodes, and the ConfigMap with its config
restarts    which exit codes start a run again: for Jobs and JobSets
trainjob, pytorchjob, jobset
            a job -> the objects of one kind; to add a kind: one such file and one line in k8s_command.py
text        objects -> YAML
validate    objects against the models of kubeflow-trainer-api; `pytorchjob_schema` is the one that these lack
cluster     an API server as we use it, and what its refusals mean
submit      objects -> a cluster, all or none
"""
