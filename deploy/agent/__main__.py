"""The bundle's first file: look at the interpreter before anything else is read.

Only syntax that Python 2.7 parses may stand here: an old interpreter must be able to say what is
wrong instead of failing on the first annotation it meets.
"""

import sys

if sys.version_info < (3, 10):
    sys.stderr.write(
        "this bundle needs Python >= 3.10, this is %d.%d\n"
        "  why: %s was started with an older interpreter\n"
        "  fix: start it with the service's own, for instance python3.10\n"
        % (sys.version_info[0], sys.version_info[1], sys.argv[0])
    )
    sys.exit(3)

from agent.sources import Sources  # type: ignore[import-not-found,unused-ignore]

sys.meta_path.insert(0, Sources(__loader__))  # type: ignore[name-defined]

from agent.main import main  # type: ignore[import-not-found,unused-ignore] # noqa: E402

sys.exit(main())
