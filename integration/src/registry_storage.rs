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
    let blob = |digest: &str| layout.join("blobs").join(digest.replace(':', "/"));
    let index = read(&layout.join("index.json"));
    let image = digest(&index["manifests"][0]);
    let manifest = read(&blob(image));
    let layers = manifest["layers"].as_array().unwrap();
    for content in layers.iter().chain([&manifest["config"]]).map(digest) {
        copy_blob(&blob(content), &root, content);
        link(&repository.join("_layers"), content);
    }
    copy_blob(&blob(image), &root, image);
    let manifests = repository.join("_manifests");
    link(&manifests.join("revisions"), image);
    link(&manifests.join("tags/latest/index"), image);
    write_link(&manifests.join("tags/latest/current"), image);
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
