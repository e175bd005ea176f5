"""Programs that measure and torment serai; run from the checkout, never installed."""
