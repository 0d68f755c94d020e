//! Imports images from an OCI layout or archive, or from a `docker save` archive.

use std::collections::HashMap;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;

use crate::config::Platform;
use crate::digest::{Algorithm, Digest, HashingReader};
use crate::error::{Cause, Error, ErrorKind, io_kind};
use crate::image::{Image, ProgressFn};
use crate::images::{Images, NewImage, StoreError};
use crate::layers::{LayerError, Lease, Source as Origin, UnpackDir};
use crate::manifest::{
    self, CONFIG_MAX, CONTAINERD_NAME, Chosen, Descriptor, Document, Fitting, MANIFEST_MAX, ManifestError,
    REF_NAME, Search, Step, choose, fits,
};
use crate::progress::{Meter, Metered};
use crate::reference::{InvalidReference, Reference};
use crate::table;
use crate::unpack::{UnpackError, Unpacked, unpack_with_recipe};

mod source;

use source::Source;

/// Maximum bytes of memory for the configurations and layer lists of one archive. Many images can refer to one file, so
/// the size of the archive does not limit the memory.
const IMAGES_MAX: u64 = 64 << 20;

/// Errors of an import.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ImportError {
    /// The archive or layout itself cannot be read. The error of the import names its path.
    #[error(transparent)]
    Archive(io::Error),
    /// Another file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the archive is neither an OCI layout nor a saved image: {reason}")]
    Layout { reason: &'static str },
    #[error("{path} is missing")]
    Missing { path: String },
    #[error("{path} is larger than {max} bytes")]
    TooLarge { path: String, max: u64 },
    #[error("{path} is damaged")]
    Json {
        path: String,
        #[source]
        source: serde_json::Error,
    },
    #[error("{path} has the digest {actual}")]
    Digest { path: String, actual: Digest },
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error(transparent)]
    Reference(#[from] InvalidReference),
    #[error("the archive has {0} images, so one name cannot be given to all of them; omit the name")]
    Several(usize),
    #[error("cannot unpack layer {path}")]
    Unpack {
        path: String,
        #[source]
        source: UnpackError,
    },
    #[error("layer {path} unpacks to {actual}, not to {expected} as the configuration says")]
    DiffId { path: String, expected: Box<Digest>, actual: Box<Digest> },
    #[error(transparent)]
    Layer(#[from] LayerError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the configuration is not UTF-8 text")]
    ConfigText,
    #[error("the import was stopped")]
    Stopped,
}

/// An image as described by the archive's documents.
struct Found {
    references: Vec<Reference>,
    /// The digest of the image's configuration.
    id: Digest,
    /// The digest in the layout's index.
    digest: Option<Digest>,
    config: Vec<u8>,
    chosen: Chosen,
    layers: Vec<LayerFile>,
}

/// Location of a layer.
#[derive(Clone)]
struct LayerFile {
    path: String,
    /// The layer's digest, if the archive has it.
    digest: Option<Digest>,
    size: u64,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Saved {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    #[serde(default)]
    layers: Vec<String>,
}

impl Found {
    /// Bytes of memory that this value takes.
    fn bytes(&self) -> u64 {
        let layers = self.layers.iter().map(|layer| size_of::<LayerFile>() + layer.path.len());
        (size_of::<Self>() + self.config.len() + layers.sum::<usize>()) as u64
    }
}

impl Images {
    /// Imports images from an OCI archive (tar, optionally compressed), an OCI layout directory or a `docker
    /// save` archive. The names are from the archive. The only image of an archive gets the name `name`, if given.
    ///
    /// # Errors
    /// If the archive is invalid, its content is corrupt, or a file cannot be written. Also if `name` is given and the
    /// archive has several images. Images that were imported before the error stay.
    pub async fn import(&self, path: &Path, name: Option<&str>) -> Result<Vec<Image>, Error> {
        self.import_with(path, name, None).await
    }

    /// Like [`import`](Self::import), with a callback for its progress.
    ///
    /// # Errors
    /// As [`import`](Self::import).
    pub async fn import_with(
        &self,
        path: &Path,
        name: Option<&str>,
        progress: Option<ProgressFn>,
    ) -> Result<Vec<Image>, Error> {
        let name = name.map(Reference::parse).transpose()?;
        let imported = self.import_all(path, name, &Meter::new(progress)).await;
        imported.map_err(|source| Error::Import { path: path.to_owned(), source: source.into() })
    }

    async fn import_all(
        &self,
        path: &Path,
        name: Option<Reference>,
        meter: &Arc<Meter>,
    ) -> Result<Vec<Image>, ImportError> {
        let (path, scratch) = (path.to_owned(), self.inner.layers.clone());
        let (platform, limits) = (self.inner.config.platform.clone(), self.inner.config.limits);
        let read = tokio::task::spawn_blocking(move || {
            let source = Source::open(&path, &scratch, &limits)?;
            let found = read_documents(&source, &platform, name.as_ref())?;
            Ok::<_, ImportError>((Arc::new(source), found))
        });
        let (source, found) = read.await.map_err(|_stopped| ImportError::Stopped)??;
        meter.start(found.iter().flat_map(|found| &found.layers).map(|layer| layer.size));
        let mut images = Ok(Vec::new());
        for found in found {
            let Ok(done) = &mut images else { break };
            match self.import_image(&source, found, meter).await {
                Ok(image) => done.push(image),
                Err(error) => images = Err(error),
            }
        }
        if images.is_err() {
            self.remove_unused_layers().await;
        }
        // Closing the source also deletes the uncompressed copy of a compressed archive.
        let closed = tokio::task::spawn_blocking(move || Arc::into_inner(source).map(Source::close));
        closed.await.map_err(|_stopped| ImportError::Stopped)?;
        images
    }

    async fn import_image(
        &self,
        source: &Arc<Source>,
        found: Found,
        meter: &Arc<Meter>,
    ) -> Result<Image, ImportError> {
        let platform = &self.inner.config.platform;
        let parsed = manifest::parse_config(&found.config, found.layers.len(), platform, found.chosen)?;
        let size = found.config.len() as u64 + found.layers.iter().map(|l| l.size).sum::<u64>();
        let id = found.id;
        let config = String::from_utf8(found.config).map_err(|_no_text| ImportError::ConfigText)?;
        let owner = String::new();
        self.may_put(&id, owner.as_str(), &config, &parsed)?;
        let (from, mut leases) = (Origin::local(), Vec::<Lease>::new());
        for (layer, diff_id) in found.layers.iter().zip(&parsed.diff_ids) {
            let (layers, limits) = (self.inner.layers.clone(), self.inner.config.limits);
            let (layer_size, meter_of_layer) = (layer.size, meter.clone());
            let (source, layer, expected) = (source.clone(), layer.clone(), *diff_id);
            let lease = self.inner.layers.ensure(*diff_id, &from, async move || {
                let unpacking = tokio::task::spawn_blocking(move || {
                    let unpack_dir = layers.unpack_dir()?;
                    let unpacked = unpack_layer(&source, &layer, expected, &meter_of_layer, |reader| {
                        let (recipe, algorithm) = (unpack_dir.recipe(), expected.algorithm());
                        unpack_with_recipe(reader, &unpack_dir.files(), &limits, &recipe, algorithm)
                    });
                    match unpacked {
                        Ok(unpacked) => Ok::<(UnpackDir, Unpacked), ImportError>((unpack_dir, unpacked)),
                        Err(error) => {
                            unpack_dir.discard();
                            Err(error)
                        }
                    }
                });
                unpacking.await.map_err(|_stopped| ImportError::Stopped)?
            });
            let lease = lease.await?;
            meter.end_layer(layer_size);
            // Keeps each layer once, at its topmost position, as in a pull.
            leases.retain(|other| other.diff_id() != lease.diff_id());
            leases.push(lease);
        }
        let leases = self.inner.layers.compose(leases).await?;
        let (mut tags, mut digests) = (Vec::new(), Vec::new());
        for reference in &found.references {
            let names = table::names(reference, found.digest);
            tags.extend(names.tags);
            digests.extend(names.digests);
        }
        Ok(self.put(NewImage { id, owner, tags, digests, size, config, parsed, leases }).await?)
    }
}

fn read_documents(
    source: &Source,
    platform: &Platform,
    name: Option<&Reference>,
) -> Result<Vec<Found>, ImportError> {
    let mut found = if let Some(index) = source.read_small("index.json", MANIFEST_MAX)? {
        let Document::Index(manifests) = manifest::parse(&index)? else {
            return Err(ImportError::Layout { reason: "index.json is not an image index" });
        };
        let entries = select_platform(manifests, platform);
        collect(entries.iter().map(|m| read_image(source, m, platform)))?
    } else if let Some(list) = source.read_small("manifest.json", MANIFEST_MAX)? {
        let saved: Vec<Saved> = serde_json::from_slice(&list)
            .map_err(|source| ImportError::Json { path: "manifest.json".into(), source })?;
        collect(saved.iter().map(|saved| read_saved(source, saved)))?
    } else {
        return Err(ImportError::Layout { reason: "index.json and manifest.json are missing" });
    };
    if let Some(name) = name {
        match found.as_mut_slice() {
            [only] => only.references = vec![name.clone()],
            many => return Err(ImportError::Several(many.len())),
        }
    }
    Ok(found)
}

/// Collects the images of an archive, up to [`IMAGES_MAX`] bytes.
fn collect(images: impl Iterator<Item = Result<Found, ImportError>>) -> Result<Vec<Found>, ImportError> {
    let (mut found, mut bytes) = (Vec::new(), 0);
    for image in images {
        let image = image?;
        bytes += image.bytes();
        if bytes > IMAGES_MAX {
            let path = "the list of images with their configurations".to_owned();
            return Err(ImportError::TooLarge { path, max: IMAGES_MAX });
        }
        found.push(image);
    }
    Ok(found)
}

/// Selects the entries of a layout for this machine. Entries with the same name are one image for several platforms.
/// Entries without a name are several images. If no entry is marked for this platform, all entries are selected.
fn select_platform(entries: Vec<Descriptor>, platform: &Platform) -> Vec<Descriptor> {
    let mut named: HashMap<Reference, Vec<Descriptor>> = HashMap::new();
    for entry in &entries {
        if let Some(name) = annotated_name(entry) {
            named.entry(name).or_default().push(entry.clone());
        }
    }
    let best: HashMap<Reference, Digest> = named
        .into_iter()
        .filter_map(|(name, entries)| match choose(&entries, platform) {
            Ok(Fitting::Marked(best)) => Some((name, best.digest)),
            Ok(Fitting::Unmarked(_)) | Err(_) => None,
        })
        .collect();
    let one_fits = entries.iter().any(|entry| annotated_name(entry).is_none() && fits(entry, platform));
    let is_selected = |entry: &Descriptor| match annotated_name(entry) {
        Some(name) => best.get(&name).is_none_or(|best| *best == entry.digest),
        None => !one_fits || entry.platform.is_none() || fits(entry, platform),
    };
    entries.iter().filter(|entry| is_selected(entry)).cloned().collect()
}

fn read_image(source: &Source, top: &Descriptor, platform: &Platform) -> Result<Found, ImportError> {
    let document = read_blob(source, top, MANIFEST_MAX)?;
    let mut search = Search::new(&document, platform)?;
    let mut absent = None;
    loop {
        let read = match search.next() {
            Ok(Step::Found(found)) => return read_found(source, top, found),
            Ok(Step::Document(wanted)) => match read_blob(source, &wanted.descriptor, MANIFEST_MAX) {
                Ok(document) => Ok(search.document(&wanted, &document)?),
                Err(error) => Err(error),
            },
            Ok(Step::Configuration(candidate)) => {
                match read_blob(source, &candidate.manifest.config, CONFIG_MAX) {
                    Ok(config) => Ok(search.configuration(candidate, config)?),
                    Err(error) => Err(error),
                }
            }
            Err(none) => return Err(absent.unwrap_or(none.into())),
        };
        match read {
            // An archive may contain only one of several candidates.
            Err(error @ ImportError::Missing { .. }) if search.is_unsure() => {
                absent.get_or_insert(error);
            }
            read => read?,
        }
    }
}

fn read_found(source: &Source, top: &Descriptor, found: manifest::Found) -> Result<Found, ImportError> {
    let manifest::Found { manifest, chosen, config } = found;
    let config = match config {
        Some(config) => config,
        None => read_blob(source, &manifest.config, CONFIG_MAX)?,
    };
    let layers = manifest.layers.iter().map(|layer| LayerFile {
        path: layer.digest.blob_path(),
        digest: Some(layer.digest),
        size: layer.size,
    });
    Ok(Found {
        references: annotated_name(top).into_iter().collect(),
        id: manifest.config.digest,
        digest: Some(top.digest),
        config,
        chosen,
        layers: layers.collect(),
    })
}

/// The name in an annotation. A bare tag, which some tools write, is not a name.
fn annotated_name(descriptor: &Descriptor) -> Option<Reference> {
    let annotations = &descriptor.annotations;
    let name = annotations
        .get(CONTAINERD_NAME)
        .or_else(|| annotations.get(REF_NAME).filter(|name| name.contains([':', '/'])))?;
    Reference::parse(name).ok()
}

fn read_saved(source: &Source, saved: &Saved) -> Result<Found, ImportError> {
    let missing = |path: &str| ImportError::Missing { path: path.to_owned() };
    let config = source.read_small(&saved.config, CONFIG_MAX)?.ok_or_else(|| missing(&saved.config))?;
    let layers = saved.layers.iter().map(|path| {
        let size = source.size(path)?.ok_or_else(|| missing(path))?;
        Ok::<_, ImportError>(LayerFile { path: path.clone(), digest: None, size })
    });
    let references = saved.repo_tags.iter().flatten().map(|tag| Reference::parse(tag));
    Ok(Found {
        id: Digest::of(&config),
        references: references.collect::<Result<Vec<_>, _>>()?,
        digest: None,
        config,
        chosen: Chosen::Direct,
        layers: layers.collect::<Result<Vec<_>, _>>()?,
    })
}

fn read_blob(source: &Source, descriptor: &Descriptor, max: u64) -> Result<Vec<u8>, ImportError> {
    let path = descriptor.digest.blob_path();
    let bytes = source.read_small(&path, max)?.ok_or_else(|| ImportError::Missing { path: path.clone() })?;
    let actual = Digest::by(descriptor.digest.algorithm(), &bytes);
    if actual == descriptor.digest { Ok(bytes) } else { Err(ImportError::Digest { path, actual }) }
}

fn unpack_layer(
    source: &Source,
    layer: &LayerFile,
    expected: Digest,
    meter: &Arc<Meter>,
    unpack: impl FnOnce(&mut BufReader<HashingReader<Box<dyn Read + Send>>>) -> Result<Unpacked, UnpackError>,
) -> Result<Unpacked, ImportError> {
    let path = layer.path.clone();
    let Some(input) = source.reader(&path)? else { return Err(ImportError::Missing { path }) };
    let input: Box<dyn Read + Send> = Box::new(Metered { input, meter: meter.clone() });
    let algorithm = layer.digest.map_or(Algorithm::Sha256, |digest| digest.algorithm());
    let mut reader = BufReader::with_capacity(128 << 10, HashingReader::new(input, algorithm));
    let unpacked =
        unpack(&mut reader).map_err(|source| ImportError::Unpack { path: path.clone(), source })?;
    // The decoder may stop before the end of the hashed data.
    io::copy(&mut reader, &mut io::sink())
        .map_err(|source| ImportError::Read { path: PathBuf::from(&path), source })?;
    let actual = reader.into_inner().finish();
    if layer.digest.is_some_and(|digest| digest != actual) {
        return Err(ImportError::Digest { path, actual });
    }
    if unpacked.diff_id != expected {
        return Err(ImportError::DiffId { path, expected: expected.into(), actual: unpacked.diff_id.into() });
    }
    Ok(unpacked)
}

// === impl ImportError ===

impl ImportError {
    /// The kind of this error.
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            ImportError::Read { source, .. } | ImportError::Archive(source) => match source.kind() {
                io::ErrorKind::NotFound => ErrorKind::NotFound,
                _ if source.raw_os_error().is_none() => ErrorKind::Corrupt,
                _ => io_kind(source),
            },
            ImportError::Layout { .. } | ImportError::Several(_) => ErrorKind::Unsupported,
            ImportError::Missing { .. }
            | ImportError::Json { .. }
            | ImportError::Digest { .. }
            | ImportError::DiffId { .. }
            | ImportError::ConfigText => ErrorKind::Corrupt,
            ImportError::TooLarge { .. } => ErrorKind::Rejected,
            ImportError::Manifest(error) => error.kind(),
            ImportError::Reference(_) => ErrorKind::InvalidReference,
            ImportError::Unpack { source, .. } => source.kind(),
            ImportError::Layer(error) => error.kind(),
            ImportError::Store(error) => error.kind(),
            ImportError::Stopped => ErrorKind::Io,
        }
    }
}

impl From<ImportError> for Cause {
    fn from(error: ImportError) -> Cause {
        Cause::new(error.kind(), error)
    }
}

#[cfg(test)]
mod tests;
