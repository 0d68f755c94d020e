//! Removals with a slow disk, a killed process, and concurrent calls.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use coracle_testing::{until, until_yielding};

use super::{entries, nothing_left, store};
use crate::Usage;
use crate::fixture::{TestImage, TestRegistry, TestTar, layer, random_bytes};

fn image() -> TestImage {
    let files = |from: usize| {
        (from..from + 300)
            .fold(TestTar::new(), |tar, n| tar.file(&format!("d{}/{n}", n % 7), &random_bytes(1000 + n)))
    };
    TestImage::new(vec![layer(files(0)), layer(files(1000)), layer(files(2000))])
}

#[tokio::test(flavor = "multi_thread")]
async fn removed_layers_count_as_usage_until_they_are_deleted() {
    let registry = TestRegistry::start().await;
    registry.push("app", "latest", &image()).await;
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let pulled = images.pull(&registry.name("app"), None, None).await.unwrap();
    let usage = images.usage();
    // Simulates a process that ended between renaming and deleting.
    drop(images);
    let rubbish = root.path().join("images/rubbish");
    std::fs::remove_dir_all(root.path().join("images/manifests")).unwrap();
    for (number, layer) in pulled.layers.iter().enumerate() {
        std::fs::rename(layer.parent().unwrap(), rubbish.join(number.to_string())).unwrap();
    }
    let images = store(root.path()).await;
    // The reported usage is never less than the actual usage.
    let is_deleted = || {
        let left = entries(&rubbish);
        let reported = images.usage();
        assert!(
            reported.bytes <= usage.bytes && (left == 0 || reported.bytes > 0 || entries(&rubbish) < left),
            "{reported:?}"
        );
        left == 0
    };
    until_yielding("the layers are deleted", 20, is_deleted).await;
    images.wait_until_deleted().await;
    assert_eq!(images.usage(), Usage::default());
    // The same image can be pulled again.
    assert_eq!(images.pull(&registry.name("app"), None, None).await.unwrap().layers, pulled.layers);
    assert_eq!(images.usage(), usage);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_is_pulled_again_while_its_layers_are_deleted() {
    let registry = TestRegistry::start().await;
    registry.push("app", "latest", &image()).await;
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let name = registry.name("app");
    for _ in 0..5 {
        let pulled = images.pull(&name, None, None).await.unwrap();
        // Waits at most 20 ms for the removal. So the next pull usually starts before the layers are deleted from the
        // disk.
        let removing = images.remove(&name);
        assert!(
            tokio::time::timeout(Duration::from_millis(20), removing).await.is_err()
                || !pulled.layers[0].exists()
        );
        let again = images.pull(&name, None, None).await.unwrap();
        assert_eq!(std::fs::read(again.layers[0].join("d0/2002")).unwrap(), random_bytes(3002));
        images.remove(&name).await.unwrap();
    }
    images.wait_until_deleted().await;
    nothing_left(root.path()).await;
}

/// Asserts that exactly the layers of listed images exist, each complete.
fn assert_consistent(images: &crate::Images, root: &Path) {
    let layers = entries(&root.join("images/layers"));
    let listed = images.list();
    assert_eq!(layers, listed.iter().map(|image| image.layers.len()).sum::<usize>());
    for layer in listed.iter().flat_map(|image| &image.layers) {
        assert_eq!(std::fs::read_dir(layer).unwrap().count(), 7, "{}", layer.display());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_removals_pulls_and_holds_are_consistent() {
    let registry = TestRegistry::start().await;
    let id = image().id();
    registry.push("app", "latest", &image()).await;
    let root = tempfile::tempdir().unwrap();
    let images = Arc::new(store(root.path()).await);
    let name = registry.name("app");
    for round in 0..8 {
        images.pull(&name, None, None).await.unwrap();
        let mut tasks = tokio::task::JoinSet::new();
        let removals = Arc::new(AtomicUsize::new(0));
        for n in 0..5 {
            let (images, name, id) = (images.clone(), name.clone(), id.clone());
            let removals = removals.clone();
            tasks.spawn(async move {
                let by = if n % 2 == 0 { &name } else { &id };
                images.remove(by).await.unwrap();
                removals.fetch_add(1, Ordering::Relaxed);
            });
        }
        for n in 0..3 {
            let (images, id, removals) = (images.clone(), id.clone(), removals.clone());
            tasks.spawn(async move {
                tokio::time::sleep(Duration::from_micros(300 * n)).await;
                // A held image stays complete while it is held.
                let Ok(held) = images.hold(&id) else { return };
                let are_removed = move || {
                    assert!(held.image().layers.iter().all(|layer| layer.join("d0").is_dir()));
                    removals.load(Ordering::Relaxed) == 5
                };
                until("the removals of the image", 20, are_removed).await;
            });
        }
        if round % 2 == 0 {
            let (images, name) = (images.clone(), name.clone());
            tasks.spawn(async move {
                images.pull(&name, None, None).await.unwrap();
            });
        }
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
        if images.get(&name).is_some() {
            assert_consistent(&images, root.path());
        }
        images.remove(&name).await.unwrap();
        assert!(images.list().is_empty());
    }
    nothing_left(root.path()).await;
}
