__dcu_overlay__ = "tiny"
