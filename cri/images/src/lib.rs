//! Container images: references, registries, pulls, unpacking and layers on disk.
//!
//! Owns everything under `<root>/images`: one record per image (`manifests/`) and one unpacked directory per layer
//! (`layers/`). Layers are unpacked in `partial/`. Partly fetched layers are in `resume/`, and removed layers that are
//! being deleted in `rubbish/`. Start reading at [`Images`]. A pull is `pull.rs`; a layer goes through `layers.rs` and
//! `unpack.rs`.
//!
//! Invariants:
//! - Complete compressed layers are never stored. Layers are unpacked during the download. Both digests (of the blob
//!   and of the tar inside) are verified before one rename makes the layer exist.
//! - A directory in `layers/` is complete and on disk (`syncfs` precedes the rename). Only such directories
//!   are handed out. Layers do not depend on each other, so images share them by diff id. References to lower
//!   layers (hard links, attributes of directories) are in a small additional layer (`layers/links.rs`).
//! - Every wait for a registry has a timeout.
//! - No path of a layer is resolved outside its directory: `unpack/root.rs` resolves all paths relative to one
//!   descriptor with `openat2(RESOLVE_IN_ROOT)`.
//! - The crate does not depend on pods, containers, CRI or Kubernetes.

mod archive;
mod changes;
mod config;
mod digest;
mod error;
mod export;
mod fetch_slots;
#[cfg(test)]
mod fixture;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
mod image;
mod images;
mod import;
mod layers;
mod manifest;
mod owner_limits;
mod pin;
mod progress;
mod pull;
mod pulls_in_progress;
mod records;
mod reference;
mod registry;
mod table;
mod unpack;

pub use changes::{apply_changes, apply_deletions};
pub use config::{ImagesConfig, Limits};
pub use error::{Cause, Error, ErrorKind};
pub use image::{Auth, Image, ImageGcInfo, Login, ProgressFn, PullProgress, Usage};
pub use images::{ImageHold, Images};
pub use pin::PinPattern;
pub use reference::{InvalidReference, Reference, Target};
