"""An image as bytes: one layer, one config, one archive, each the same on every machine.

Nothing here talks to an engine; `deploy.carriers.image` does. Two people who assemble the same
inputs get the same ids without ever having met an engine.
"""
