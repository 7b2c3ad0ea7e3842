"""OpenShift: manifests of a job, their checks, the client and a simulator of the operators."""
