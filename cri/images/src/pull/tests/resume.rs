//! Data that is not requested twice: the received parts of layers, even after a restart, and images in the store.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::{LONG, entries, nothing_left, store};
use crate::digest::Digest;
use crate::fixture::{
    ProxyFault, TestImage, TestProxy, TestRegistry, TestTar, layer, random_bytes, zstd_with_large_window,
};
use crate::{ErrorKind, Images};

const SIZE: usize = 6 << 20;

fn image() -> TestImage {
    TestImage::new(vec![layer(TestTar::new().file("noise", &random_bytes(SIZE)))])
}

fn spools(root: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(root.join("images/resume")).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// Pulls through a proxy that passes only the first bytes of the layer. Then drops the store, as at the end of the
/// process.
async fn pull_interrupted(registry: &TestRegistry, image: &TestImage, root: &Path) {
    let blob = Digest::of(&image.layers[0]).to_string();
    let proxy = TestProxy::to(registry.address(), move |head, _| match head.contains(&blob) {
        true if head.contains("range:") => {
            ProxyFault::Reply("HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n".into())
        }
        true => ProxyFault::Cut(3_000_000),
        false => ProxyFault::Pass,
    })
    .await;
    let images = store(root).await;
    images.pull(&proxy.name("big"), None, None).await.unwrap_err();
}

/// Pulls through a working proxy. Returns the requested ranges.
async fn pull_completely(registry: &TestRegistry, images: &Images) -> Vec<String> {
    let proxy = TestProxy::to(registry.address(), |_, _| ProxyFault::Pass).await;
    let pulled = images.pull(&proxy.name("big"), None, None).await.unwrap();
    assert_eq!(std::fs::read(pulled.layers[0].join("noise")).unwrap(), random_bytes(SIZE));
    proxy
        .requests()
        .iter()
        .filter_map(|h| h.split("range: bytes=").nth(1)?.lines().next().map(str::to_owned))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partly_received_layer_is_resumed_after_a_restart() {
    let registry = TestRegistry::start().await;
    let image = image();
    registry.push("big", "latest", &image).await;
    let root = tempfile::tempdir().unwrap();
    pull_interrupted(&registry, &image, root.path()).await;
    let kept = std::fs::metadata(&spools(root.path())[0]).unwrap().len();
    assert!((1_000_000..3_000_000).contains(&kept), "{kept}");
    let images = store(root.path()).await;
    assert_eq!(pull_completely(&registry, &images).await, [format!("{kept}-")]);
    assert_eq!(spools(root.path()), [] as [PathBuf; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_with_a_large_zstd_window_is_resumed_too() {
    let registry = TestRegistry::start().await;
    let tar = TestTar::new().file("noise", &random_bytes(SIZE)).finish();
    let image = TestImage::new(vec![(zstd_with_large_window(&tar), Digest::of(&tar))]);
    registry.push("big", "latest", &image).await;
    let blob = Digest::of(&image.layers[0]).to_string();
    let parts = AtomicUsize::new(0);
    let proxy = TestProxy::to(registry.address(), move |head, _| {
        match head.contains(&blob) && head.contains("range:") {
            true if parts.fetch_add(1, Ordering::Relaxed) == 0 => ProxyFault::Cut(3_000_000),
            true => ProxyFault::Reply("HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n".into()),
            false => ProxyFault::Pass,
        }
    })
    .await;
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    images.pull(&proxy.name("big"), None, None).await.unwrap_err();
    let kept = std::fs::metadata(&spools(root.path())[0]).unwrap().len();
    assert!(kept > 1_000_000, "{kept}");
    assert_eq!(pull_completely(&registry, &images).await.last(), Some(&format!("{kept}-")));
    assert_eq!(spools(root.path()), [] as [PathBuf; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn spooled_data_is_not_trusted() {
    let registry = TestRegistry::start().await;
    let image = image();
    registry.push("big", "latest", &image).await;
    for damage in [
        |bytes: &mut Vec<u8>| bytes[1_000_000] ^= 0x55,
        |bytes: &mut Vec<u8>| bytes[..8].fill(0),
        |bytes: &mut Vec<u8>| bytes.resize(2 * SIZE, 7),
        |bytes: &mut Vec<u8>| bytes.resize(SIZE, 0),
    ] {
        let root = tempfile::tempdir().unwrap();
        pull_interrupted(&registry, &image, root.path()).await;
        let path = &spools(root.path())[0];
        let mut bytes = std::fs::read(path).unwrap();
        damage(&mut bytes);
        std::fs::write(path, bytes).unwrap();
        let images = store(root.path()).await;
        pull_completely(&registry, &images).await;
        assert_eq!(spools(root.path()), [] as [PathBuf; 0]);
        assert_eq!(entries(&root.path().join("images/partial")), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unchanged_image_costs_one_request() {
    let registry = TestRegistry::start().await;
    registry.push("app", "one", &TestImage::small("x")).await;
    registry.push("app", "two", &TestImage::small("x")).await;
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let proxy = TestProxy::to(registry.address(), |_, _| ProxyFault::Pass).await;
    let first = images.pull(&proxy.name("app:one"), None, None).await.unwrap();
    let before = proxy.requests().len();
    for name in [proxy.name("app:one"), first.digests[0].clone(), proxy.name("app:two")] {
        assert_eq!(images.pull(&name, None, None).await.unwrap().id, first.id);
    }
    assert_eq!((proxy.requests().len() - before, proxy.count("HEAD")), (3, 3), "{:?}", proxy.requests());
    assert_eq!(images.get(&first.id).unwrap().tags, [proxy.name("app:two"), proxy.name("app:one")]);
    // With a digest the tag is not requested.
    let both = format!("{}:gone@{}", proxy.name("app"), first.digests[0].split_once('@').unwrap().1);
    assert_eq!(images.pull(&both, None, None).await.unwrap().tags.len(), 2);
    assert_eq!(images.get(&both).map(|image| image.id), Some(first.id));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_retry_after_header_of_a_busy_registry_is_respected() {
    let registry = TestRegistry::start().await;
    registry.push("app", "latest", &TestImage::small("x")).await;
    let busy = |seconds: u32| {
        let head = "HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n";
        ProxyFault::Reply(format!("{head}retry-after: {seconds}\r\n\r\n"))
    };
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    // The registry is busy for a second after the first request of a document. A client that comes back earlier is
    // refused again.
    let first_requests = Mutex::new(std::collections::HashMap::new());
    let proxy = TestProxy::to(registry.address(), move |head, _| {
        let line = head.lines().next().unwrap().to_owned();
        let mut first_requests = first_requests.lock().unwrap();
        let first = *first_requests.entry(line).or_insert_with(Instant::now);
        if first.elapsed() < Duration::from_secs(1) { busy(1) } else { ProxyFault::Pass }
    })
    .await;
    images.pull(&proxy.name("app"), None, None).await.unwrap();
    let mut requests = std::collections::HashMap::<String, usize>::new();
    for head in proxy.requests().iter().filter(|head| head.starts_with("GET ")) {
        *requests.entry(head.lines().next().unwrap().to_owned()).or_default() += 1;
    }
    // The manifest, the configuration and the layer.
    assert!(requests.len() >= 3 && requests.values().all(|count| *count == 2), "{requests:?}");
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let proxy = TestProxy::to(registry.address(), move |_, _| busy(3600)).await;
    // The registry asks for a pause of an hour.
    let refused = tokio::time::timeout(LONG, images.pull(&proxy.name("app"), None, None)).await;
    let error = refused.expect("no pause of an hour").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.report().contains("429"), "{}", error.report());
    nothing_left(root.path()).await;
}
