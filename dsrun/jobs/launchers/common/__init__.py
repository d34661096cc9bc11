"""Modules that launchers share: clusters' files, the ranks' environment, the agent's command, shell scripts."""
