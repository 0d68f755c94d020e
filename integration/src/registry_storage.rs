//! Images in the storage directory of docker-registry. The server reads the directory at each request, so an image
//! needs no push. A push takes seconds of processor time in an emulated machine.

use std::fs;
use std::path::Path;

use serde_json::Value;

/// Adds the image of an OCI layout to a storage directory as `<name>:latest`. A running server serves it at once.
///
/// # Panics
/// When the layout is not complete, or the directory cannot be written.
pub(crate) fn add_image(storage: &Path, layout: &Path, name: &str) {
    let root = storage.join("docker/registry/v2");
    let repository = root.join("repositories").join(name);
    let index = read(&layout.join("index.json"));
    let image = digest(&index["manifests"][0]);
    add_manifest(&root, &repository, layout, image);
    let tag = repository.join("_manifests/tags/latest");
    link(&tag.join("index"), image);
    write_link(&tag.join("current"), image);
}

/// Adds the manifest of an image, or of several platforms with their images.
fn add_manifest(root: &Path, repository: &Path, layout: &Path, manifest_digest: &str) {
    let blob = |digest: &str| layout.join("blobs").join(digest.replace(':', "/"));
    let manifest = read(&blob(manifest_digest));
    let parts = |field: &str| manifest[field].as_array().cloned().unwrap_or_default();
    for image in &parts("manifests") {
        add_manifest(root, repository, layout, digest(image));
    }
    for content in parts("layers").iter().chain(manifest.get("config")).map(digest) {
        copy_blob(&blob(content), root, content);
        link(&repository.join("_layers"), content);
    }
    copy_blob(&blob(manifest_digest), root, manifest_digest);
    link(&repository.join("_manifests/revisions"), manifest_digest);
}

fn read(path: &Path) -> Value {
    let text = fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_slice(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn digest(descriptor: &Value) -> &str {
    descriptor["digest"].as_str().unwrap()
}

/// Copies a blob to `blobs/<algorithm>/<first two digits>/<digits>/data`.
fn copy_blob(from: &Path, root: &Path, digest: &str) {
    let (algorithm, digits) = digest.split_once(':').unwrap();
    let directory = root.join("blobs").join(algorithm).join(&digits[..2]).join(digits);
    fs::create_dir_all(&directory).unwrap();
    fs::copy(from, directory.join("data")).unwrap_or_else(|e| panic!("{}: {e}", from.display()));
}

/// Refers to a blob in `<directory>/<algorithm>/<digits>/link`.
fn link(directory: &Path, digest: &str) {
    write_link(&directory.join(digest.replace(':', "/")), digest);
}

fn write_link(directory: &Path, digest: &str) {
    fs::create_dir_all(directory).unwrap();
    fs::write(directory.join("link"), digest).unwrap();
}
