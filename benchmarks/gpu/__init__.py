"""The check of a GPU host, `make gpu-check`: its tests, measurements and profiles, one process each.

Only the processes that it starts import more than Python's own library: it also runs where all else is missing.

missing         what the host lacks
parts           the commands, in order, and the time that each may take
report          what is kept of each part
profile_step    one decode and one prefill step under torch's profiler
interpreter     the same path on a CPU, through Triton's interpreter
"""
