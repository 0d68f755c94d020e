//! Exports an image as an OCI archive. The layers are uncompressed, byte for byte as pulled, so the image
//! keeps its id. Every layer is hashed during the export, which also detects damage on disk.

use std::fs::File;
use std::io::{self, BufWriter};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};

use crate::digest::{Digest, HashingReader};
use crate::error::{Cause, Error, ErrorKind, io_kind};
use crate::image::ProgressFn;
use crate::images::Images;
use crate::layers::Layers;
use crate::manifest::{self, ManifestError};
use crate::progress::{Meter, Metered};
use crate::records::Record;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// Errors of an export.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExportError {
    #[error("cannot write {}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "layer {diff_id} cannot be rebuilt: its archive contains a name twice, or an earlier version stored it; pull the image again"
    )]
    Recipe { diff_id: Digest },
    #[error("cannot read layer {diff_id}")]
    Read {
        diff_id: Digest,
        #[source]
        source: io::Error,
    },
    #[error("layer {diff_id} is damaged on disk: it has the digest {actual}")]
    Damaged { diff_id: Box<Digest>, actual: Box<Digest> },
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error("the export was stopped")]
    Stopped,
}

/// Contents of an archive to be written.
struct Export {
    layers: Arc<Layers>,
    record: Record,
    /// The lowest layer first, as in the configuration. The same layer may occur twice.
    diff_ids: Vec<Digest>,
    meter: Arc<Meter>,
}

/// An archive that is being written.
type Archive = tar::Builder<BufWriter<File>>;

impl Images {
    /// Writes an image to a file, as an OCI archive that [`Images::import`] and other tools read. The file is
    /// renamed into place when it is complete, and replaces an existing file.
    ///
    /// # Errors
    /// If the image does not exist, a layer is damaged or cannot be rebuilt, or a file cannot be written. Also if the path
    /// is a device or a link, such as `/dev/stdout`: the archive would replace it.
    pub async fn export(&self, name_or_id: &str, to: &Path) -> Result<(), Error> {
        self.export_with(name_or_id, to, None).await
    }

    /// Like [`export`](Self::export), with a callback for its progress.
    ///
    /// # Errors
    /// As [`export`](Self::export).
    pub async fn export_with(
        &self,
        name_or_id: &str,
        to: &Path,
        progress: Option<ProgressFn>,
    ) -> Result<(), Error> {
        // The image must not be removed during the export.
        let held = self.hold(name_or_id)?;
        let failed = |source: ExportError| Error::Export {
            image: name_or_id.to_owned(),
            path: to.to_owned(),
            source: source.into(),
        };
        let record = self.table().find(&held.image().id).map(|entry| entry.record.clone());
        let record = record.ok_or_else(|| Error::UnknownImage { name: name_or_id.to_owned() })?;
        let (layers, to) = (self.inner.layers.clone(), to.to_owned());
        let written = tokio::task::spawn_blocking(move || {
            let _held = held;
            let diff_ids = manifest::diff_ids(record.config.as_bytes())?;
            Export { layers, record, diff_ids, meter: Meter::new(progress) }.write(&to)
        });
        written.await.unwrap_or(Err(ExportError::Stopped)).map_err(failed)
    }
}

// === impl Export ===

impl Export {
    fn write(&self, to: &Path) -> Result<(), ExportError> {
        let mut temporary = to.as_os_str().to_owned();
        temporary.push(".new");
        let temporary = PathBuf::from(temporary);
        let cannot = |source| ExportError::Write { path: to.to_owned(), source };
        if std::fs::symlink_metadata(to).is_ok_and(|found| !found.is_file()) {
            return Err(cannot(io::Error::other("it exists and is not a regular file")));
        }
        let written = create(&temporary).map_err(cannot).and_then(|file| {
            let mut archive = tar::Builder::new(BufWriter::with_capacity(1 << 20, file));
            self.fill(&mut archive, to)?;
            let file = archive.into_inner().and_then(|buffer| Ok(buffer.into_inner()?)).map_err(cannot)?;
            file.sync_all().map_err(cannot)?;
            std::fs::rename(&temporary, to).map_err(cannot)
        });
        if written.is_err()
            && let Err(error) = std::fs::remove_file(&temporary)
        {
            tracing::debug!(%error, path = %temporary.display(), "cannot remove an unfinished archive");
        }
        written
    }

    fn fill(&self, archive: &mut Archive, to: &Path) -> Result<(), ExportError> {
        let sizes = self.diff_ids.iter().map(|id| self.open(id).map(|(_, size)| size));
        let sizes = sizes.collect::<Result<Vec<u64>, _>>()?;
        let distinct = self.diff_ids.iter().zip(&sizes).enumerate();
        let distinct = distinct.filter(|(at, (diff_id, _))| !self.diff_ids[..*at].contains(*diff_id));
        self.meter.start(distinct.map(|(_, (_, size))| *size));
        let config = self.record.config.as_bytes();
        let manifest = text(&self.manifest(&sizes));
        let index = text(&self.index(&manifest));
        let cannot = |source| ExportError::Write { path: to.to_owned(), source };
        let mut add = |name: &str, content: &[u8]| {
            let mut header = header(content.len() as u64);
            archive.append_data(&mut header, name, content).map_err(cannot)
        };
        add("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        add("index.json", &index)?;
        add("manifest.json", &text(&self.docker_manifest()))?;
        add(&Digest::of(&manifest).blob_path(), &manifest)?;
        add(&self.record.id.blob_path(), config)?;
        for (at, diff_id) in self.diff_ids.iter().enumerate() {
            if !self.diff_ids[..at].contains(diff_id) {
                self.layer(archive, diff_id, to)?;
            }
        }
        Ok(())
    }

    fn layer(&self, archive: &mut Archive, diff_id: &Digest, to: &Path) -> Result<(), ExportError> {
        let (rebuilt, size) = self.open(diff_id)?;
        let metered = Metered { input: rebuilt, meter: self.meter.clone() };
        let mut reader = HashingReader::new(metered, diff_id.algorithm());
        let mut tracked = FailureTracker { input: &mut reader, failed: false };
        let added = archive.append_data(&mut header(size), diff_id.blob_path(), &mut tracked);
        let failed = tracked.failed;
        added.map_err(|source| match failed {
            true => ExportError::Read { diff_id: *diff_id, source },
            false => ExportError::Write { path: to.to_owned(), source },
        })?;
        let actual = reader.finish();
        if actual == *diff_id {
            self.meter.end_layer(size);
            return Ok(());
        }
        Err(ExportError::Damaged { diff_id: (*diff_id).into(), actual: actual.into() })
    }

    fn open(&self, diff_id: &Digest) -> Result<(crate::unpack::Rebuilt, u64), ExportError> {
        self.layers.rebuild(diff_id).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => ExportError::Recipe { diff_id: *diff_id },
            _ => ExportError::Read { diff_id: *diff_id, source },
        })
    }

    fn manifest(&self, sizes: &[u64]) -> Value {
        let layers = self.diff_ids.iter().zip(sizes);
        json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, "digest": self.record.id, "size": self.record.config.len()},
            "layers": layers
                .map(|(id, size)| json!({"mediaType": LAYER, "digest": id, "size": size}))
                .collect::<Vec<_>>(),
        })
    }

    /// The content of index.json: one entry for each name. Other tools write the same form, and [`Images::import`]
    /// reads it.
    fn index(&self, manifest: &[u8]) -> Value {
        let entry = |name: Option<&String>| {
            let mut entry =
                json!({"mediaType": MANIFEST, "digest": Digest::of(manifest), "size": manifest.len()});
            if let Some(name) = name {
                let tag = name.rsplit(':').next().unwrap_or_default();
                entry["annotations"] =
                    json!({"io.containerd.image.name": name, "org.opencontainers.image.ref.name": tag});
            }
            entry
        };
        let mut entries: Vec<Value> = self.record.tags.iter().map(|tag| entry(Some(tag))).collect();
        if entries.is_empty() {
            entries.push(entry(None));
        }
        json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries})
    }

    /// The content of manifest.json, for tools that read the `docker save` format only.
    fn docker_manifest(&self) -> Value {
        let layers: Vec<String> = self.diff_ids.iter().map(Digest::blob_path).collect();
        json!([{"Config": self.record.id.blob_path(), "RepoTags": self.record.tags, "Layers": layers}])
    }
}

/// A reader that records whether reading has failed.
struct FailureTracker<'a, R> {
    input: &'a mut R,
    failed: bool,
}

impl<R: io::Read> io::Read for FailureTracker<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(buffer);
        self.failed |= read.is_err();
        read
    }
}

/// Creates the archive with mode 0600, as `docker save` does. In a world-writable directory another user may have made
/// a file or a link of that name. Such a file is removed and never opened.
fn create(path: &Path) -> io::Result<File> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    File::options().write(true).create_new(true).mode(0o600).open(path)
}

fn text(value: &Value) -> Vec<u8> {
    value.to_string().into_bytes()
}

fn header(size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(size);
    header
}

// === impl ExportError ===

impl ExportError {
    /// The kind of this error.
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            ExportError::Write { source, .. } => io_kind(source),
            ExportError::Recipe { .. } => ErrorKind::Unsupported,
            ExportError::Read { .. } | ExportError::Damaged { .. } | ExportError::Manifest(_) => {
                ErrorKind::Corrupt
            }
            ExportError::Stopped => ErrorKind::Io,
        }
    }
}

impl From<ExportError> for Cause {
    fn from(error: ExportError) -> Cause {
        Cause::new(error.kind(), error)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::{Arc, Mutex};

    use crate::digest::Digest;
    use crate::fixture::{TestImage, TestRegistry, TestTar, attributes, layer, random_bytes, zstd};
    use crate::{ErrorKind, Images, ImagesConfig, ProgressFn, PullProgress};

    async fn store(root: &Path) -> Images {
        Images::open(ImagesConfig::new(root)).await.unwrap()
    }

    fn image() -> TestImage {
        let odd = TestTar::new()
            .pax(&[("path", "long/".repeat(60).as_bytes()), ("mtime", b"12.5")])
            .directory("x")
            .pax(&[
                ("GNU.sparse.major", b"1"),
                ("GNU.sparse.realsize", b"100000"),
                ("GNU.sparse.name", b"sparse"),
            ])
            .file("y", &[b"1\n90000\n5\n".as_slice(), &[0; 502], b"there"].concat())
            .symlink("link", "nowhere")
            .hard_link("again", "sparse")
            .with(b'3', "null", "1:3", attributes(0o666, 0, 5, 5))
            .file("noise", &random_bytes(300_001))
            .file(".wh.gone", b"")
            .finish();
        let first = layer(TestTar::new().directory("d").file("d/one", b"1").file("empty", b""));
        TestImage::new(vec![first.clone(), (zstd(&odd), Digest::of(&odd)), first])
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn an_exported_image_is_identical_after_an_import() {
        let registry = TestRegistry::start().await;
        registry.push("app", "v1", &image()).await;
        let (root, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let images = store(root.path()).await;
        let pulled = images.pull(&registry.name("app:v1"), None, None).await.unwrap();
        let archive = root.path().join("app.tar");
        images.export(&registry.name("app:v1"), &archive).await.unwrap();
        let link = root.path().join("stdout");
        std::os::unix::fs::symlink("/proc/self/fd/1", &link).unwrap();
        images.export(&pulled.id, &link).await.expect_err("the archive would replace the link");
        assert!(link.is_symlink());
        let there = store(other.path()).await;
        let imported = there.import(&archive, None).await.unwrap();
        assert_eq!((&imported[0].id, &imported[0].tags), (&pulled.id, &pulled.tags));
        // Other tools can read the archive.
        let listed = std::process::Command::new("skopeo")
            .args(["--insecure-policy", "inspect", "--config", &format!("oci-archive:{}", archive.display())])
            .output();
        assert!(listed.unwrap().status.success());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn an_export_and_an_import_report_their_bytes_and_layers() {
        let registry = TestRegistry::start().await;
        registry.push("app", "v1", &image()).await;
        let (root, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let images = store(root.path()).await;
        let pulled = images.pull(&registry.name("app:v1"), None, None).await.unwrap();
        let archive = root.path().join("app.tar");
        let reports = Arc::new(Mutex::new(Vec::new()));
        let into = reports.clone();
        let report: ProgressFn = Arc::new(move |at| into.lock().unwrap().push(at.clone()));
        images.export_with(&pulled.id, &archive, Some(report.clone())).await.unwrap();
        let exported: Vec<PullProgress> = std::mem::take(&mut *reports.lock().unwrap());
        // The archive has the first layer once, its manifest has it twice.
        store(other.path()).await.import_with(&archive, None, Some(report)).await.unwrap();
        let imported: Vec<PullProgress> = std::mem::take(&mut *reports.lock().unwrap());
        for (reports, layers) in [(exported, 2), (imported, 3)] {
            let (first, last) = (&reports[0], &reports[reports.len() - 1]);
            assert_eq!((first.bytes_done, first.layers_done, first.layers_total), (0, 0, layers));
            assert!(first.bytes_total > 300_000, "{first:?}");
            let complete = (first.bytes_total, first.bytes_total, layers);
            assert_eq!((last.bytes_done, last.bytes_total, last.layers_done), complete);
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_damaged_layer_is_detected_and_no_archive_is_left() {
        let registry = TestRegistry::start().await;
        registry.push("app", "v1", &image()).await;
        let root = tempfile::tempdir().unwrap();
        let images = store(root.path()).await;
        let pulled = images.pull(&registry.name("app:v1"), None, None).await.unwrap();
        let noise = pulled.layers.iter().map(|layer| layer.join("noise")).find(|path| path.exists()).unwrap();
        let file = std::fs::File::options().write(true).open(noise).unwrap();
        file.set_len(200_000).unwrap();
        let archive = root.path().join("app.tar");
        let error = images.export(&pulled.id, &archive).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{}", error.report());
        assert!(!archive.exists() && !root.path().join("app.tar.new").exists());
        assert_eq!(images.export("no/such", &archive).await.unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn an_archive_with_a_duplicate_name_cannot_be_rebuilt_and_is_reported() {
        let registry = TestRegistry::start().await;
        let twice = layer(TestTar::new().file("a", b"1").file("a", b"2"));
        registry.push("twice", "v1", &TestImage::new(vec![twice])).await;
        let root = tempfile::tempdir().unwrap();
        let images = store(root.path()).await;
        let pulled = images.pull(&registry.name("twice:v1"), None, None).await.unwrap();
        let error = images.export(&pulled.id, &root.path().join("t.tar")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.report().contains("twice"), "{}", error.report());
    }
}
