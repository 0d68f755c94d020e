//! Container images: references, registries, content, unpacking and layers.
//!
//! Owns everything under `<root>/images`: one small record per image (`manifests/`), one unpacked directory per
//! layer (`layers/`), the workshop where layers are unpacked before they are trusted (`partial/`), and what is being
//! deleted (`rubbish/`).
//! Start reading at [`Images`]; a pull is `pull.rs`, the way of one layer is `layers.rs` → `unpack.rs`.
//!
//! Invariants:
//! - Compressed layers are never stored: they are unpacked while they download, and both digests (of the blob and
//!   of the tar inside) are verified before the one rename that makes a layer exist.
//! - A layer directory under `layers/` is whole and on disk (`syncfs` comes before the rename); nothing else is
//!   ever handed out. Layers do not depend on each other, so images share them by diff id; what one says of
//!   those below it (a hard link, a directory's attributes) is said in a small layer above it (`layers/links.rs`).
//! - A registry is waited for, but never for ever: every phase of a pull has its time.
//! - No path of a layer is resolved outside of its directory: all of `unpack/root.rs` is relative to one
//!   descriptor, by `openat2(RESOLVE_IN_ROOT)`.
//! - Knows nothing of pods, containers, CRI or Kubernetes.

mod archive;
mod changes;
mod config;
mod digest;
mod error;
mod export;
#[cfg(test)]
mod fixture;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
mod image;
mod images;
mod import;
mod layers;
mod manifest;
mod pin;
mod pull;
mod records;
mod reference;
mod registry;
mod table;
mod unpack;

pub use changes::{hide, lay};
pub use config::{ImagesConfig, Limits, Platform};
pub use error::{Cause, Error, ErrorKind};
pub use image::{Auth, Image, Login, PullProgress, Standing, Usage};
pub use images::{Held, Images};
pub use pin::PinPattern;
pub use pull::ProgressFn;
pub use reference::{InvalidReference, Reference, Target};
