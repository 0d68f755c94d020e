//! Selection of the image for this machine.

use super::store;
use crate::ErrorKind;
use crate::digest::Digest;
use crate::fixture::{ProxyFault, TestImage, TestProxy, TestRegistry, descriptor};

#[tokio::test(flavor = "multi_thread")]
async fn the_image_for_this_machine_is_selected_from_an_index() {
    let registry = TestRegistry::start().await;
    let root = tempfile::tempdir().unwrap();
    let (ours, other) = (TestImage::small("ours"), TestImage::small("other"));
    registry.push("multi", "ours", &ours).await;
    registry.push("multi", "other", &other).await;
    let manifest = |image: &TestImage, architecture: &str| {
        let mut value = descriptor("application/vnd.docker.distribution.manifest.v2+json", &image.manifest);
        value["platform"] = serde_json::json!({"os": "linux", "architecture": architecture});
        value
    };
    let host = crate::config::Platform::host().architecture;
    let media_type = "application/vnd.oci.image.index.v1+json";
    let index = |manifests: Vec<serde_json::Value>| {
        let index = serde_json::json!({"schemaVersion": 2, "mediaType": media_type, "manifests": manifests});
        serde_json::to_vec(&index).unwrap()
    };
    let good = index(vec![manifest(&other, "s390x"), manifest(&ours, &host)]);
    let digest = registry.push_manifest("multi", "latest", media_type, &good).await;
    registry.push_manifest("multi", "foreign", media_type, &index(vec![manifest(&other, "s390x")])).await;
    let images = store(root.path()).await;
    let pulled = images.pull(&registry.name("multi"), None, None).await.unwrap();
    assert_eq!(pulled.id, ours.id());
    assert_eq!(pulled.digests, [format!("{}@{digest}", registry.name("multi"))]);
    let again = images.pull(&pulled.digests[0], None, None).await.unwrap();
    assert_eq!((again.id, again.tags), (pulled.id, pulled.tags));
    let error = images.pull(&registry.name("multi:foreign"), None, None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.report().contains("s390x"), "{}", error.report());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_image_is_selected_from_an_index_without_platforms() {
    let registry = TestRegistry::start().await;
    let root = tempfile::tempdir().unwrap();
    let (ours, mut other) = (TestImage::small("ours"), TestImage::small("other"));
    for_another_processor(&mut other);
    registry.push("unmarked", "other", &other).await;
    registry.push("unmarked", "ours", &ours).await;
    let manifest = |image: &TestImage| {
        descriptor("application/vnd.docker.distribution.manifest.v2+json", &image.manifest)
    };
    let media_type = "application/vnd.oci.image.index.v1+json";
    let (first, second) = (manifest(&other), manifest(&ours));
    let index =
        serde_json::json!({"schemaVersion": 2, "mediaType": media_type, "manifests": [first, second]});
    registry.push_manifest("unmarked", "latest", media_type, index.to_string().as_bytes()).await;
    let images = store(root.path()).await;
    let line = TestProxy::to(registry.address(), |_, _| ProxyFault::Pass).await;
    let pulled = images.pull(&line.name("unmarked"), None, None).await;
    assert_eq!(pulled.map(|pulled| pulled.id).map_err(|error| error.report()), Ok(ours.id()));
    let config = Digest::of(&ours.config).to_string();
    assert_eq!(line.count(&config), 1, "{:?}", line.requests());
    // The registry may have only the second manifest.
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let gone = Digest::of(&other.manifest).to_string();
    let line = TestProxy::to(registry.address(), move |head, _| match head.contains(&gone) {
        true => ProxyFault::Reply("HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n".into()),
        false => ProxyFault::Pass,
    })
    .await;
    let pulled = images.pull(&line.name("unmarked"), None, None).await;
    assert_eq!(pulled.map(|pulled| pulled.id).map_err(|error| error.report()), Ok(ours.id()));
}

/// Changes the image's configuration to another architecture.
fn for_another_processor(image: &mut TestImage) {
    let host = crate::config::Platform::host().architecture;
    let text = String::from_utf8(image.config.clone()).unwrap();
    let config = text.replace(&format!("\"{host}\""), "\"s390x\"");
    assert_ne!(config, text);
    let manifest = String::from_utf8(image.manifest.clone()).unwrap();
    let (old, new) = (Digest::of(&image.config).to_string(), Digest::of(config.as_bytes()).to_string());
    let (old_size, new_size) = (format!("\"size\":{}", text.len()), format!("\"size\":{}", config.len()));
    image.manifest = manifest.replace(&old, &new).replace(&old_size, &new_size).into_bytes();
    image.config = config.into_bytes();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_single_image_for_another_processor_is_pulled() {
    let registry = TestRegistry::start().await;
    let mut image = TestImage::small("x");
    for_another_processor(&mut image);
    registry.push("other", "latest", &image).await;
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let pulled = images.pull(&registry.name("other"), None, None).await;
    assert_eq!(pulled.map(|pulled| pulled.id).map_err(|error| error.report()), Ok(image.id()));
    drop(images);
    assert_eq!(store(root.path()).await.list().len(), 1);
}
