//! Pulls an image: resolves it, selects the platform, fetches and unpacks missing layers, writes the record.
//!
//! Compressed layers are not written to the disk, except spools for a resume. One task reads a layer from the network
//! and verifies its digest; a blocking thread decompresses, hashes and writes it. A bounded channel between them limits
//! the memory.

use futures::{StreamExt, TryStreamExt, stream};
use tokio::sync::watch;

use crate::digest::{Digest, InvalidDigest};
use crate::error::{Cause, Error, ErrorKind};
use crate::image::{Image, Login, ProgressFn, PullProgress};
use crate::images::{Images, NewImage, StoreError};
use crate::layers::{LayerError, Lease, Source};
use crate::manifest::{self, Descriptor, Found, ManifestError, ParsedConfig, Search, Step};
use crate::pulls_in_progress::{PullKey, SharedPull};
use crate::reference::{Reference, Target};
use crate::registry::{Fetched, Registry, RegistryError, Timeouts};
use crate::table::{self, Names};
use crate::unpack::UnpackError;

mod layer;

/// Errors of a pull.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PullError {
    #[error(transparent)]
    Registry(#[from] RegistryError),
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error("cannot unpack layer {digest}")]
    Unpack {
        digest: Box<Digest>,
        #[source]
        source: UnpackError,
    },
    #[error("layer {digest} unpacks to {actual}, not to {expected} as the configuration says")]
    DiffId { digest: Box<Digest>, expected: Box<Digest>, actual: Box<Digest> },
    #[error(transparent)]
    Layer(#[from] LayerError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the configuration is not UTF-8 text")]
    ConfigText,
    #[error(transparent)]
    Digest(#[from] InvalidDigest),
    #[error("the pull was stopped")]
    Stopped,
    /// Internal: the caller repeats the fetch. A pull never returns this error.
    #[error("the layer waits for its next time slice")]
    TimeSliceOver,
}

/// Resources of a pull.
pub(crate) struct Pull {
    images: Images,
    /// Owner of the pull. The pulls of one owner share their [slots](crate::fetch_slots).
    owner: String,
    source: Source,
    registry: Registry,
    progress: watch::Sender<PullProgress>,
}

impl Images {
    /// Pulls an image, or finds it in the store if the name's digest at the registry is unchanged. Equal
    /// concurrent pulls are merged. A pull stops when no caller awaits it any more, and leaves no
    /// incomplete layer.
    ///
    /// # Errors
    /// See [`ErrorKind`].
    pub async fn pull(
        &self,
        reference: &str,
        login: Option<Login>,
        progress: Option<ProgressFn>,
    ) -> Result<Image, Error> {
        self.pull_for("", reference, login, progress).await
    }

    /// [`pull`](Self::pull) on behalf of an owner. The pulls of one owner never occupy all slots for layers.
    ///
    /// # Errors
    /// See [`ErrorKind`].
    pub async fn pull_for(
        &self,
        owner: &str,
        reference: &str,
        login: Option<Login>,
        progress: Option<ProgressFn>,
    ) -> Result<Image, Error> {
        let reference = Reference::parse(reference)?;
        let key = PullKey { owner: owner.to_owned(), reference, login };
        let pull = self.inner.pulls.join(key, |key| self.start_pull(key));
        pull.wait(progress).await.unwrap_or_else(|| Err(stopped()))
    }

    fn start_pull(&self, key: PullKey) -> SharedPull {
        let (progress, progress_out) = watch::channel(PullProgress::default());
        let (result, result_out) = watch::channel(None);
        let images = self.clone();
        let task = tokio::spawn(async move {
            let PullKey { owner, reference, login } = key;
            let _permit = images.inner.owner_limits.acquire(&owner).await;
            let pulled = pull(&images, owner, &reference, login.as_ref(), progress).await;
            if let Err(error) = &pulled {
                if error.kind() == ErrorKind::NoSpace {
                    images.inner.layers.spools.clear();
                }
                images.remove_unused_layers().await;
            }
            let name = reference.to_string();
            let pulled = pulled.map_err(|e| Error::Pull { reference: name, source: e.into() });
            result.send_replace(Some(pulled));
        });
        SharedPull { progress: progress_out, result: result_out, task: task.abort_handle() }
    }
}

/// The error of a pull whose task was aborted, for example at shutdown.
fn stopped() -> Error {
    Error::Pull { reference: "the image".to_owned(), source: PullError::Stopped.into() }
}

async fn pull(
    images: &Images,
    owner: String,
    reference: &Reference,
    login: Option<&Login>,
    progress: watch::Sender<PullProgress>,
) -> Result<Image, PullError> {
    let config = &images.inner.config;
    let directory = config.registry_config_dir.as_deref();
    let timeouts = Timeouts { stall: config.stall_timeout, progress: config.progress_timeout };
    let registry = Registry::new(directory, reference, login, timeouts)?;
    let source = Source::registry(&owner, reference, login);
    let pull = Pull { images: images.clone(), owner, source, registry, progress };
    if let Some(image) = pull.known(reference).await? {
        return Ok(image);
    }
    let top = match reference.target() {
        Target::Tag(tag) => pull.registry.resolve(tag).await?,
        // The digest was validated when the reference was parsed.
        Target::Digest(digest) => pull.registry.by_digest(digest.parse::<Digest>()?).await?,
    };
    let names = table::names(reference, Some(top.digest));
    let found = pull.find(&top).await?;
    pull.image(found, names).await
}

// === impl Pull ===

impl Pull {
    /// The image of a reference, if it is in the store. Sends one request to the registry. The request also
    /// checks the credentials. If the request fails, the normal pull reports the error.
    async fn known(&self, reference: &Reference) -> Result<Option<Image>, PullError> {
        let repository = reference.repository();
        if !self.images.table().has_repository(&repository) {
            return Ok(None);
        }
        let Some(digest) = self.registry.digest(reference.target()).await else { return Ok(None) };
        let found = self.images.table().find(&format!("{repository}@{digest}")).map(|e| e.record.clone());
        let Some(record) = found else { return Ok(None) };
        let layers = &self.images.inner.layers;
        let leases: Option<Vec<Lease>> = record.layers.iter().map(|id| layers.lease(*id)).collect();
        let (Some(leases), Ok(config)) = (leases, manifest::read_config(record.config.as_bytes())) else {
            return Ok(None);
        };
        let Names { tags, digests } = table::names(reference, Some(digest));
        let parsed = ParsedConfig { config, diff_ids: Vec::new() };
        let (id, size, config, owner) = (record.id, record.size, record.config, self.owner.clone());
        let new = NewImage { id, owner, tags, digests, size, config, parsed, leases };
        Ok(Some(self.images.put(new).await?))
    }

    /// Follows indexes to the image for this platform.
    async fn find(&self, top: &Fetched) -> Result<Found, PullError> {
        let mut search = Search::new(&top.bytes, &self.images.inner.config.platform)?;
        let mut absent = None;
        loop {
            let read = match search.next() {
                Ok(Step::Found(found)) => return Ok(found),
                Ok(Step::Document(wanted)) => match self.registry.by_digest(wanted.descriptor.digest).await {
                    Ok(fetched) => Ok(search.document(&wanted, &fetched.bytes)?),
                    Err(error) => Err(error.into()),
                },
                Ok(Step::Configuration(candidate)) => match self.config(&candidate.manifest.config).await {
                    Ok(config) => Ok(search.configuration(candidate, config.into_bytes())?),
                    Err(error) => Err(error),
                },
                Err(none) => return Err(absent.unwrap_or(none.into())),
            };
            match read {
                // One of several candidates may have been deleted.
                Err(error) if search.is_unsure() && error.kind() == ErrorKind::NotFound => {
                    absent.get_or_insert(error);
                }
                read => read?,
            }
        }
    }

    async fn image(&self, found: Found, names: Names) -> Result<Image, PullError> {
        let Found { manifest, chosen, config } = found;
        let Names { tags, digests } = names;
        let config = match config {
            Some(config) => String::from_utf8(config).map_err(|_no_text| PullError::ConfigText)?,
            None => self.config(&manifest.config).await?,
        };
        let platform = &self.images.inner.config.platform;
        let parsed = manifest::parse_config(config.as_bytes(), manifest.layers.len(), platform, chosen)?;
        let id = manifest.config.digest;
        self.images.may_put(&id, self.owner.as_str(), &config, &parsed)?;
        let size = manifest.config.size + manifest.layers.iter().map(|layer| layer.size).sum::<u64>();
        let wanted = wanted(&manifest.layers, &parsed.diff_ids);
        self.progress.send_replace(PullProgress {
            bytes_total: wanted.iter().map(|layer| layer.descriptor.size).sum(),
            layers_total: wanted.len(),
            ..PullProgress::default()
        });
        let leases = self.layers(wanted).await?;
        coracle_fault::point("pull.layers");
        let owner = self.owner.clone();
        let new = NewImage { id, owner, tags, digests, size, config, parsed, leases };
        Ok(self.images.put(new).await?)
    }

    async fn config(&self, descriptor: &Descriptor) -> Result<String, PullError> {
        let known = self.images.table().entry(&descriptor.digest).map(|e| e.record.config.clone());
        if let Some(known) = known {
            return Ok(known);
        }
        let bytes = self.registry.blob(descriptor).read_all().await?;
        String::from_utf8(bytes).map_err(|_no_text| PullError::ConfigText)
    }

    /// Gets all layers, several at a time. If a layer fails with a temporary error, the complete layers are kept for a
    /// retry.
    async fn layers(&self, wanted: Vec<WantedLayer>) -> Result<Vec<Lease>, PullError> {
        let order: Vec<Digest> = wanted.iter().map(|layer| layer.diff_id).collect();
        let mut kept = IncompletePull { images: &self.images, leases: Vec::new(), keep: true };
        let mut getting = stream::iter(wanted)
            .map(|layer| async move { self.layer(&layer.descriptor, layer.diff_id).await })
            .buffer_unordered(self.images.inner.config.parallel_layers.max(1));
        loop {
            match getting.try_next().await {
                Ok(Some(lease)) => kept.leases.push(lease),
                Ok(None) => break,
                Err(error) => {
                    kept.keep = error.kind() == ErrorKind::Unavailable;
                    return Err(error);
                }
            }
        }
        drop(getting);
        let mut leases = std::mem::take(&mut kept.leases);
        leases.sort_by_key(|lease| order.iter().position(|id| *id == lease.diff_id()));
        Ok(self.images.inner.layers.compose(leases).await?)
    }
}

/// A layer of the image.
#[derive(Clone)]
struct WantedLayer {
    /// Descriptor of the compressed layer in the registry.
    descriptor: Descriptor,
    /// Digest of the uncompressed layer.
    diff_id: Digest,
}

/// Layers of an incomplete image. A failed or cancelled pull releases them here.
struct IncompletePull<'a> {
    images: &'a Images,
    leases: Vec<Lease>,
    keep: bool,
}

// === impl IncompletePull ===

impl Drop for IncompletePull<'_> {
    fn drop(&mut self) {
        if self.leases.is_empty() {
            return;
        }
        for lease in &mut self.leases {
            if self.keep {
                lease.keep();
            }
        }
        self.leases.clear();
        self.images.schedule_sweep();
    }
}

/// Each layer once, at its topmost position: overlayfs refuses duplicate directories, and the topmost occurrence hides
/// the lower occurrences.
fn wanted(layers: &[Descriptor], diff_ids: &[Digest]) -> Vec<WantedLayer> {
    let pairs = layers.iter().cloned().zip(diff_ids.iter().copied());
    let all: Vec<WantedLayer> =
        pairs.map(|(descriptor, diff_id)| WantedLayer { descriptor, diff_id }).collect();
    let again_above = |at: usize| all[at + 1..].iter().any(|layer| layer.diff_id == all[at].diff_id);
    (0..all.len()).filter(|at| !again_above(*at)).map(|at| all[at].clone()).collect()
}

// === impl PullError ===

impl PullError {
    /// The kind of this error.
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            PullError::Registry(error) => error.kind(),
            PullError::Manifest(error) => error.kind(),
            PullError::Unpack { source, .. } => source.kind(),
            PullError::DiffId { .. } | PullError::ConfigText => ErrorKind::Corrupt,
            PullError::Digest(_) => ErrorKind::InvalidReference,
            PullError::Layer(error) => error.kind(),
            PullError::Store(error) => error.kind(),
            PullError::Stopped | PullError::TimeSliceOver => ErrorKind::Unavailable,
        }
    }
}

impl From<PullError> for Cause {
    fn from(error: PullError) -> Cause {
        Cause::new(error.kind(), error)
    }
}

#[cfg(test)]
mod tests;
