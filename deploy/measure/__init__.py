"""Read what a measured run left, and say what it proves: results, statistics, score, profiles."""
