"""Compile the extensions on local disk, and say what the log and the binary prove.

`build.build` is the face. `log` and `elf` read evidence, `proof` draws gates 2 to 4 from it.
Nothing here writes outside the build folder, the compiler cache and the folder the results go to.
"""
