//! Layers with `urls`: layers that a registry is not permitted to distribute.

use super::{nothing_left, store};
use crate::digest::Digest;
use crate::fixture::{
    PASSWORD, ProxyFault, TestImage, TestProxy, TestRegistry, TestTar, USER, descriptor, layer, random_bytes,
};
use crate::{Auth, ErrorKind};

const TYPE: &str = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip";
const SIZE: usize = 2 << 20;

/// An image whose layer is at these URLs.
fn image(layer_urls: &[String]) -> TestImage {
    let mut image = TestImage::new(vec![layer(TestTar::new().file("noise", &random_bytes(SIZE)))]);
    let mut manifest: serde_json::Value = serde_json::from_slice(&image.manifest).unwrap();
    manifest["layers"][0] = descriptor(TYPE, &image.layers[0]);
    manifest["layers"][0]["urls"] = layer_urls.into();
    image.manifest = serde_json::to_vec(&manifest).unwrap();
    image
}

/// A proxy to a registry that serves the configuration but not the layer. The proxy serves the manifest
/// itself, because registries refuse such manifests.
async fn without_layer(registry: &TestRegistry, image: &TestImage) -> TestProxy {
    registry.push_blob("app", &image.config).await;
    let manifest = String::from_utf8(image.manifest.clone()).unwrap();
    let length = manifest.len();
    let reply = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{manifest}");
    TestProxy::to(registry.address(), move |head, _| match head.contains("/manifests/") {
        true => ProxyFault::Reply(reply.clone()),
        false => ProxyFault::Pass,
    })
    .await
}

/// A URL at which the layer is available, with a failure to inject.
async fn place(other_registry: &TestRegistry, fault: ProxyFault) -> (TestProxy, String) {
    let layer = &image(&[]).layers[0];
    other_registry.push_blob("elsewhere", layer).await;
    let line = TestProxy::to(other_registry.address(), move |_, _| fault.clone()).await;
    let url = format!("http://{}", line.name(&format!("v2/elsewhere/blobs/{}", Digest::of(layer))));
    (line, url)
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_missing_at_the_registry_come_from_their_urls_without_credentials() {
    let (registry, other_registry) = (TestRegistry::start_with_password().await, TestRegistry::start().await);
    let challenge =
        "HTTP/1.1 401 Unauthorized\r\nwww-authenticate: Basic realm=\"x\"\r\ncontent-length: 6\r\n\r\nsecret";
    let (greedy, first) = place(&other_registry, ProxyFault::Reply(challenge.into())).await;
    let (damaged, second) = place(&other_registry, ProxyFault::Flip(1_000_000)).await;
    let (good, third) = place(&other_registry, ProxyFault::Pass).await;
    let image = image(&["ftp://e.example/layer".to_owned(), first, second, third]);
    let line = without_layer(&registry, &image).await;
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let auth = Auth::Basic { username: USER.into(), password: PASSWORD.into() };
    let pulled = images.pull(&line.name("app"), Some(auth.into()), None).await;
    let pulled = pulled.map_err(|error| error.report()).unwrap();
    assert_eq!(std::fs::read(pulled.layers[0].join("noise")).unwrap(), random_bytes(SIZE));
    assert!(line.count("/blobs/") >= 2 && line.requests().iter().any(|head| head.contains("authorization:")));
    for place in [&greedy, &damaged, &good] {
        let requests = place.requests();
        assert!(
            !requests.is_empty() && requests.iter().all(|head| !head.contains("authorization:")),
            "{requests:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_at_the_registry_are_not_requested_from_their_urls() {
    let (registry, other_registry) = (TestRegistry::start().await, TestRegistry::start().await);
    let (line, url) = place(&other_registry, ProxyFault::Pass).await;
    let image = image(&[url]);
    registry.push_blob("app", &image.layers[0]).await;
    let own = without_layer(&registry, &image).await;
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    images.pull(&own.name("app"), None, None).await.unwrap();
    assert_eq!(line.requests(), [] as [String; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_error_for_a_layer_without_a_source_names_all_urls_and_no_text_of_their_responses() {
    let (registry, other_registry) = (TestRegistry::start().await, TestRegistry::start().await);
    let secret = "HTTP/1.1 403 Forbidden\r\ncontent-length: 6\r\n\r\nsecret";
    let (_refusing, refused) = place(&other_registry, ProxyFault::Reply(secret.into())).await;
    let (_damaging, damaged) = place(&other_registry, ProxyFault::Flip(9)).await;
    for (layer_urls, kind, expected) in [
        (vec![refused.clone()], ErrorKind::Unauthorized, "answers 403 Forbidden"),
        (vec![refused.clone(), damaged.clone()], ErrorKind::Unauthorized, "has the digest"),
        (vec!["file:///etc/passwd".to_owned()], ErrorKind::NotFound, "404"),
    ] {
        let root = tempfile::tempdir().unwrap();
        let images = store(root.path()).await;
        let line = without_layer(&registry, &image(&layer_urls)).await;
        let error = images.pull(&line.name("app"), None, None).await.unwrap_err();
        let report = error.report();
        assert_eq!(error.kind(), kind, "{report}");
        assert!(report.contains(expected) && report.contains(line.address()), "{report}");
        assert!(
            layer_urls.iter().all(|url| report.contains(url.as_str()) || url.starts_with("file:")),
            "{report}"
        );
        assert!(!report.contains("secret"), "{report}");
        nothing_left(root.path()).await;
    }
}
