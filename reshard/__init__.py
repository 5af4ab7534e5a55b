"""SOURCE to plan to bundles, and back: packing, resharding, exporting, all as plans of byte ranges."""
