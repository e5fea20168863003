"""Errors of many providers on the same inputs."""
