//! The image service: pull, list, status, remove, file system.

use std::collections::HashMap;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use coracle_images::{Auth, Image, Login, ProgressFn, PullProgress, Reference};
use coracle_proto::cri;
use serde_json::json;

use super::container_create::image_error;
use super::list_stream::batches;
use super::sandbox_run::now;
use super::status::{Answer, Streamed, blocking};
use crate::error::Error;
use crate::runtime::Runtime;

impl Runtime {
    /// Pulls an image and returns its id. For which pod, and what its image's annotations say, which are the pod's, means
    /// nothing here: every pod sees the same store, in one layout, and images are those of this machine's platform.
    pub(crate) async fn image_pull(
        &self,
        request: cri::PullImageRequest,
    ) -> Result<cri::PullImageResponse, Error> {
        let reference = reference(request.image)?;
        let login = request.auth.map(login).transpose()?.flatten();
        let began = std::time::Instant::now();
        let pulled = self.inner.images.pull(&reference, login, Some(progress(reference.clone()))).await;
        let image = pulled.map_err(|source| image_error(&reference, source))?;
        tracing::info!(reference, id = image.id, bytes = image.size, took = ?began.elapsed(), "image pulled");
        Ok(cri::PullImageResponse { image_ref: image.id })
    }

    /// All images, or those of one name; of a name without a tag, those of its repository.
    pub(crate) fn image_list(&self, request: cri::ListImagesRequest) -> cri::ListImagesResponse {
        cri::ListImagesResponse { images: self.images_that(request.filter).iter().map(item).collect() }
    }

    /// The same, in pieces.
    pub(crate) fn image_stream(
        &self,
        request: cri::StreamImagesRequest,
    ) -> Streamed<cri::StreamImagesResponse> {
        let items = self.images_that(request.filter).into_iter().map(|image| item(&image));
        batches(items, |images| cri::StreamImagesResponse { images })
    }

    fn images_that(&self, filter: Option<cri::ImageFilter>) -> Vec<Image> {
        let name = filter.and_then(|filter| filter.image).map(|image| image.image).unwrap_or_default();
        if name.is_empty() {
            return self.inner.images.list();
        }
        let found = self.inner.images.get(&name);
        let Some(repository) = whole_repository(&name) else { return found.into_iter().collect() };
        let mut images = self.inner.images.list();
        images.retain(|image| {
            found.as_ref().is_some_and(|found| found.id == image.id) || is_of(image, &repository)
        });
        images
    }

    /// One image; none, and no error, when it is absent.
    pub(crate) fn image_status(
        &self,
        request: cri::ImageStatusRequest,
    ) -> Result<cri::ImageStatusResponse, Error> {
        let reference = reference(request.image)?;
        let Some(image) = self.inner.images.get(&reference) else {
            return Ok(cri::ImageStatusResponse::default());
        };
        let mut info = HashMap::new();
        if request.verbose {
            info.insert("info".to_owned(), self.image_info(&image).to_string());
        }
        Ok(cri::ImageStatusResponse { image: Some(item(&image)), info })
    }

    fn image_info(&self, image: &Image) -> serde_json::Value {
        let standing = self.inner.images.standing(&image.id);
        let time = |time| jiff::Timestamp::try_from(time).ok();
        json!({
            "imageSpec": *image.config,
            "layers": image.layers,
            "layerBytes": standing.as_ref().map(|standing| standing.layer_bytes.clone()),
            "pulledAt": standing.as_ref().and_then(|standing| time(standing.pulled)),
            "lastUsedAt": standing.as_ref().and_then(|standing| time(standing.used)),
            "inUse": standing.is_some_and(|standing| standing.held),
        })
    }

    /// Removes an image with all of its names.
    pub(crate) async fn image_remove(
        &self,
        request: cri::RemoveImageRequest,
    ) -> Result<cri::RemoveImageResponse, Error> {
        let reference = reference(request.image)?;
        let removed = self.inner.images.remove(&reference).await;
        removed.map_err(|source| image_error(&reference, source))?;
        Ok(cri::RemoveImageResponse {})
    }

    /// What images and writable layers take, and which file systems they are on: who removed images asks this, and then
    /// how much is free there, as the kubelet does before it evicts a pod. So what was removed is waited for here, once.
    pub(crate) async fn image_fs_info(&self) -> Answer<cri::ImageFsInfoResponse> {
        self.inner.images.given_back().await;
        blocking(self, |runtime| Ok(runtime.filesystems())).await
    }

    fn filesystems(&self) -> cri::ImageFsInfoResponse {
        let usage = self.inner.images.usage();
        let images = filesystem(self.inner.images.directory(), usage.bytes, usage.inodes);
        let (bytes, inodes) = self.writable_usage();
        let containers = filesystem(self.inner.records.layers_dir(), bytes, inodes);
        cri::ImageFsInfoResponse { image_filesystems: vec![images], container_filesystems: vec![containers] }
    }
}

/// Refuses an image for another way to run it than the only one.
pub(super) fn check_handler(image: &cri::ImageSpec) -> Result<(), Error> {
    match image.runtime_handler.as_str() {
        "" => Ok(()),
        other => Err(Error::invalid("image.runtime_handler", format!("there is none named {other:?}"))),
    }
}

/// What is pulled, found or removed. What the user wrote for it is for people to read.
fn reference(image: Option<cri::ImageSpec>) -> Result<String, Error> {
    let image = image.unwrap_or_default();
    check_handler(&image)?;
    let reference = image.image;
    if reference.is_empty() {
        return Err(Error::invalid("image", "is missing"));
    }
    Ok(reference)
}

/// The CRI has no way to tell how far a pull is; the log has.
fn progress(reference: String) -> ProgressFn {
    Arc::new(move |told| {
        let PullProgress { bytes_done, bytes_total, layers_done, layers_total } = told;
        tracing::debug!(reference, bytes_done, bytes_total, layers_done, layers_total, "pulling");
    })
}

/// Credentials and the host that they are for, which they may name.
fn login(config: cri::AuthConfig) -> Result<Option<Login>, Error> {
    let address = config.server_address.clone();
    Ok(auth(config)?.map(|auth| Login { auth, address }))
}

/// Credentials in the CRI's forms; none when all are empty.
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

/// The repository that a name without tag and digest stands for, where images are listed.
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
