//! Container images: references, registries, content, unpacking and layers.
