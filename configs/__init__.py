"""Configs of DeepSpeed, shapes of models, the schema of the coat block. Ships as `coat_launch.configs`."""
