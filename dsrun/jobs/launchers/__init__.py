"""Launchers: ways to start a job. Each is a small module with one function,

    command(job, run_dir, port, extra) -> list of arguments

which turns the job into the command that starts it, without doing anything. `local` is the only one so far.
"""
