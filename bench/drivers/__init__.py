"""Programs that drive a peer from outside. Each takes the same lines on standard input and answers each with JSON.

    cycle SECONDS JOBS    create + run(true) + stop, over and over
    create COUNT JOBS     create that many one by one, and keep them
    many COUNT            create that many in one call, and keep them
    run SECONDS JOBS      run(true) in sandboxes kept, chosen at random
    stop JOBS             stop all that are kept

A driver is a process of its own, so that what the client costs is counted apart from the server.
"""
