"""Kubernetes manifests of a run, and their submission to an API server: the parts of `megalite k8s`.

parsing         what users give (names, quantities, claims, variables, paths in the config) -> checked values
templates.yaml  the objects of each kind of job
manifests       a job and the templates -> objects and YAML; a new kind needs a template and values there
cluster         an API server: dry runs, creation of all objects or none, and what its refusals mean
"""
