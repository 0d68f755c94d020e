//! The image service: pull, list, status, remove, file system.

use std::collections::HashMap;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use coracle_images::{Auth, Image, Images, Login, ProgressFn, PullProgress, Reference};
use coracle_proto::cri;
use serde_json::json;
use tokio::sync::watch;

use crate::clock::now;
use crate::error::Error;
use crate::list_stream::Streamed;
use crate::list_stream::batches;
use crate::records::Records;
use crate::stats::StatsService;

/// Pulls, lists and removes images.
#[derive(Clone)]
pub(crate) struct ImageService {
    pub(crate) images: Images,
    pub(crate) records: Arc<Records>,
    pub(crate) stats: StatsService,
}

// === impl ImageService ===

impl ImageService {
    /// Notifies of changes of images and their names.
    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.images.changes()
    }

    /// Pulls an image and returns its id. Image annotations are ignored, because images are always for this machine's
    /// platform. Only the namespace of the pod's configuration is used: it limits the slots that the pulls of one
    /// namespace get.
    pub(crate) async fn image_pull(
        &self,
        request: cri::PullImageRequest,
    ) -> Result<cri::PullImageResponse, Error> {
        let reference = reference(request.image)?;
        let login = request.auth.map(login).transpose()?.flatten();
        let began = std::time::Instant::now();
        let namespace = namespace(request.sandbox_config);
        let pulled =
            self.images.pull_for(&namespace, &reference, login, Some(progress(reference.clone()))).await;
        let image = pulled.map_err(|source| image_error(&reference, source))?;
        tracing::info!(reference, id = image.id, bytes = image.size, took = ?began.elapsed(), "image pulled");
        Ok(cri::PullImageResponse { image_ref: image.id })
    }

    /// All images, or the images that match a name. A name without a tag matches its whole repository.
    pub(crate) fn image_list(&self, request: cri::ListImagesRequest) -> cri::ListImagesResponse {
        cri::ListImagesResponse { images: self.matching(request.filter).iter().map(item).collect() }
    }

    /// [`image_list`](Self::image_list) as a stream of batches.
    pub(crate) fn image_stream(
        &self,
        request: cri::StreamImagesRequest,
    ) -> Streamed<cri::StreamImagesResponse> {
        let items = self.matching(request.filter).into_iter().map(|image| item(&image));
        batches(items, |images| cri::StreamImagesResponse { images })
    }

    fn matching(&self, filter: Option<cri::ImageFilter>) -> Vec<Image> {
        let name = filter.and_then(|filter| filter.image).map(|image| image.image).unwrap_or_default();
        if name.is_empty() {
            return self.images.list();
        }
        let found = self.images.get(&name);
        let Some(repository) = whole_repository(&name) else { return found.into_iter().collect() };
        let mut images = self.images.list();
        images.retain(|image| {
            found.as_ref().is_some_and(|found| found.id == image.id) || is_of(image, &repository)
        });
        images
    }

    /// The status of an image. If the image is absent, the response is empty, not an error.
    pub(crate) fn image_status(
        &self,
        request: cri::ImageStatusRequest,
    ) -> Result<cri::ImageStatusResponse, Error> {
        let reference = reference(request.image)?;
        let Some(image) = self.images.get(&reference) else {
            return Ok(cri::ImageStatusResponse::default());
        };
        let mut info = HashMap::new();
        if request.verbose {
            info.insert("info".to_owned(), self.image_info(&image).to_string());
        }
        Ok(cri::ImageStatusResponse { image: Some(item(&image)), info })
    }

    fn image_info(&self, image: &Image) -> serde_json::Value {
        let gc = self.images.gc_info(&image.id);
        let time = |time| jiff::Timestamp::try_from(time).ok();
        json!({
            "imageSpec": *image.config,
            "layers": image.layers,
            "layerBytes": gc.as_ref().map(|gc| gc.layer_bytes.clone()),
            "pulledAt": gc.as_ref().and_then(|gc| time(gc.pulled)),
            "lastUsedAt": gc.as_ref().and_then(|gc| time(gc.used)),
            "inUse": gc.is_some_and(|gc| gc.held),
        })
    }

    /// Removes an image with all of its names.
    pub(crate) async fn image_remove(
        &self,
        request: cri::RemoveImageRequest,
    ) -> Result<cri::RemoveImageResponse, Error> {
        let reference = reference(request.image)?;
        let removed = self.images.remove(&reference).await;
        removed.map_err(|source| image_error(&reference, source))?;
        Ok(cri::RemoveImageResponse {})
    }

    /// Waits until removed images are deleted from the disk. The kubelet removes images and then queries the free space
    /// before it evicts a pod.
    pub(crate) async fn wait_for_removals(&self) {
        self.images.wait_for_space().await;
    }

    /// Usage and file systems of images and writable layers. Blocks, because it reads files.
    pub(crate) fn filesystems(&self) -> cri::ImageFsInfoResponse {
        let usage = self.images.usage();
        let images = filesystem(self.images.directory(), usage.bytes, usage.inodes);
        let layers = self.stats.writable_usage();
        let containers = filesystem(self.records.layers_dir(), layers.bytes, layers.inodes);
        cri::ImageFsInfoResponse { image_filesystems: vec![images], container_filesystems: vec![containers] }
    }
}

/// Refuses an image for a runtime handler: there is only the default handler.
pub(crate) fn check_handler(image: &cri::ImageSpec) -> Result<(), Error> {
    match image.runtime_handler.as_str() {
        "" => Ok(()),
        other => {
            Err(Error::invalid("image.runtime_handler", format!("runtime handler {other:?} does not exist")))
        }
    }
}

/// The reference of a request. `user_specified_image` is only informational.
fn reference(image: Option<cri::ImageSpec>) -> Result<String, Error> {
    let image = image.unwrap_or_default();
    check_handler(&image)?;
    let reference = image.image;
    if reference.is_empty() {
        return Err(Error::invalid("image", "is missing"));
    }
    Ok(reference)
}

/// The namespace of the pod. Empty if the request has no namespace.
fn namespace(pod: Option<cri::PodSandboxConfig>) -> String {
    pod.and_then(|pod| pod.metadata).map(|metadata| metadata.namespace).unwrap_or_default()
}

/// Logs the progress of a pull: the CRI has no field for it.
fn progress(reference: String) -> ProgressFn {
    Arc::new(move |progress| {
        let PullProgress { bytes_done, bytes_total, layers_done, layers_total } = progress;
        tracing::debug!(reference, bytes_done, bytes_total, layers_done, layers_total, "pulling an image");
    })
}

/// Credentials, and the registry host that they are for, if it is set.
fn login(config: cri::AuthConfig) -> Result<Option<Login>, Error> {
    let address = config.server_address.clone();
    Ok(auth(config)?.map(|auth| Login { auth, address }))
}

/// Credentials in one of the forms of the CRI. `None` if all fields are empty.
fn auth(config: cri::AuthConfig) -> Result<Option<Auth>, Error> {
    if !config.identity_token.is_empty() {
        return Ok(Some(Auth::IdentityToken(config.identity_token)));
    }
    if !config.registry_token.is_empty() {
        return Ok(Some(Auth::RegistryToken(config.registry_token)));
    }
    if !config.username.is_empty() {
        return Ok(Some(Auth::Basic { username: config.username, password: config.password }));
    }
    if config.auth.is_empty() {
        return Ok(None);
    }
    let invalid = || Error::invalid("auth.auth", "is not base64 of user:password");
    let bytes = STANDARD.decode(&config.auth).map_err(|_encoding| invalid())?;
    let text = String::from_utf8(bytes).map_err(|_encoding| invalid())?;
    let (username, password) = text.split_once(':').ok_or_else(invalid)?;
    // Some tools pad the password with zero bytes.
    let password = password.trim_matches('\0').to_owned();
    Ok(Some(Auth::Basic { username: username.to_owned(), password }))
}

fn item(image: &Image) -> cri::Image {
    let user = image.user().split(':').next().unwrap_or_default();
    let uid = user.parse::<i64>().ok();
    cri::Image {
        id: image.id.clone(),
        repo_tags: image.tags.clone(),
        repo_digests: image.digests.clone(),
        size: image.size,
        uid: uid.map(|value| cri::Int64Value { value }),
        username: if uid.is_some() { String::new() } else { user.to_owned() },
        spec: Some(cri::ImageSpec { image: image.id.clone(), ..Default::default() }),
        pinned: image.pinned,
    }
}

/// The repository of a name without tag and digest, for image lists.
fn whole_repository(name: &str) -> Option<String> {
    let last = name.rsplit('/').next().unwrap_or_default();
    let reference = Reference::parse(name).ok()?;
    (!last.contains([':', '@'])).then(|| reference.repository())
}

fn is_of(image: &Image, repository: &str) -> bool {
    let names = image.tags.iter().chain(&image.digests);
    names.filter_map(|name| Reference::parse(name).ok()).any(|name| name.repository() == repository)
}

fn filesystem(path: &std::path::Path, bytes: u64, inodes: u64) -> cri::FilesystemUsage {
    cri::FilesystemUsage {
        timestamp: now(),
        fs_id: Some(cri::FilesystemIdentifier { mountpoint: path.to_string_lossy().into_owned() }),
        used_bytes: Some(cri::UInt64Value { value: bytes }),
        inodes_used: Some(cri::UInt64Value { value: inodes }),
    }
}

pub(crate) fn image_error(reference: &str, source: coracle_images::Error) -> Error {
    Error::Image { reference: reference.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_without_a_tag_lists_its_repository() {
        let digest = format!("nginx@sha256:{}", "a".repeat(64));
        for (name, expected) in [
            ("nginx", Some("docker.io/library/nginx")),
            ("r.example:5000/team/app", Some("r.example:5000/team/app")),
            ("nginx:latest", None),
            (digest.as_str(), None),
        ] {
            assert_eq!(whole_repository(name).as_deref(), expected, "{name}");
        }
    }

    #[test]
    fn credentials_in_every_form() {
        let basic = Auth::Basic { username: "u".into(), password: "p:q".into() };
        let encoded = cri::AuthConfig { auth: STANDARD.encode("u:p:q\0\0"), ..Default::default() };
        assert_eq!(auth(encoded).expect("valid"), Some(basic));
        assert_eq!(auth(cri::AuthConfig::default()).expect("valid"), None);
        assert!(auth(cri::AuthConfig { auth: "!".into(), ..Default::default() }).is_err());
    }
}
