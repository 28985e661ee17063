"""Copy csrc into the build folder and convert the named files there with torch's own tool."""

import argparse
import os
import shutil

from torch.utils.hipify.hipify_python import hipify

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--from", dest="source", required=True)
    parser.add_argument("--to", dest="target", required=True)
    parser.add_argument("files", nargs="+")
    asked = parser.parse_args()

    shutil.copytree(asked.source, asked.target, dirs_exist_ok=True)
    hipify(
        project_directory=os.path.abspath(asked.source),
        output_directory=os.path.abspath(asked.target),
        header_include_dirs=["."],
        includes=[os.path.abspath(asked.target) + "/*"],
        extra_files=[os.path.abspath(name) for name in asked.files],
        show_detailed=True,
        is_pytorch_extension=True,
        hipify_extra_files_only=True,
    )
