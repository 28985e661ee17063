    if diag.takes(rows):
        return "candidate"
