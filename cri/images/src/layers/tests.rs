//! Tests of layers: concurrent unpacking, references, and recovery from an unclean stop.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use super::{KEEP, LayerError, Layers, Source};
use crate::digest::Digest;
use crate::unpack::Unpacked;

fn unpacked(diff_id: Digest) -> Unpacked {
    Unpacked { diff_id, bytes: 4096, inodes: 1, implied: Vec::new(), links: Vec::new() }
}

async fn add(layers: &Arc<Layers>, name: &str) -> super::Lease {
    let diff_id = Digest::of(name.as_bytes());
    let local = Source::local();
    let made = layers.ensure(diff_id, &local, async || {
        let unpack_dir = layers.unpack_dir()?;
        std::fs::write(unpack_dir.files().join(name), name).unwrap();
        Ok::<_, LayerError>((unpack_dir, unpacked(diff_id)))
    });
    made.await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_is_unpacked_once_and_kept_while_referenced() {
    let root = tempfile::tempdir().unwrap();
    let layers = Arc::new(Layers::open(root.path()).unwrap());
    let id = Digest::of(b"a");
    let (count, local) = (AtomicUsize::new(0), Source::local());
    let get = || {
        layers.ensure(id, &local, async || {
            count.fetch_add(1, Ordering::SeqCst);
            // The other callers begin meanwhile.
            tokio::task::yield_now().await;
            Ok::<_, LayerError>((layers.unpack_dir()?, unpacked(id)))
        })
    };
    let (one, two, three) = tokio::join!(get(), get(), get());
    assert_eq!(count.load(Ordering::SeqCst), 1);
    drop((one, two));
    layers.sweep(Instant::now()).unwrap();
    assert!(layers.path(&id).is_dir());
    assert_eq!(layers.usage().bytes, 4096);
    drop(three);
    layers.sweep(Instant::now()).unwrap();
    assert!(!layers.path(&id).exists());
    assert_eq!(std::fs::read_dir(root.path().join("partial")).unwrap().count(), 0);
}

#[tokio::test]
async fn a_waiting_caller_retries_when_the_first_fails() {
    let root = tempfile::tempdir().unwrap();
    let layers = Arc::new(Layers::open(root.path()).unwrap());
    let id = Digest::of(b"a");
    let local = Source::local();
    let (waits, has_waited) = tokio::sync::oneshot::channel();
    let failing = layers.ensure(id, &local, async move || {
        has_waited.await.unwrap();
        Err::<(super::UnpackDir, Unpacked), _>(LayerError::Stopped)
    });
    let second = async {
        let mut second = Box::pin(add(&layers, "a"));
        assert!(futures::poll!(&mut second).is_pending(), "it waits for the first caller");
        waits.send(()).unwrap();
        second.await
    };
    let (first, second) = tokio::join!(failing, second);
    assert!(first.is_err());
    assert_eq!(second.diff_id(), id);
}

#[tokio::test]
async fn layers_of_a_broken_pull_are_kept_for_a_retry() {
    let root = tempfile::tempdir().unwrap();
    let layers = Arc::new(Layers::open(root.path()).unwrap());
    let mut lease = add(&layers, "a").await;
    lease.keep();
    drop(lease);
    layers.sweep(Instant::now()).unwrap();
    assert!(layers.next_expiry().is_some());
    assert!(layers.path(&Digest::of(b"a")).is_dir());
    layers.sweep(Instant::now() + KEEP).unwrap();
    assert!(!layers.path(&Digest::of(b"a")).exists());
    assert_eq!(layers.next_expiry(), None);
}

#[tokio::test]
async fn after_an_unclean_stop_only_complete_layers_are_kept() {
    let root = tempfile::tempdir().unwrap();
    let layers = Arc::new(Layers::open(root.path()).unwrap());
    drop((add(&layers, "good").await, add(&layers, "torn").await, add(&layers, "other").await));
    let half = layers.unpack_dir().unwrap();
    std::fs::create_dir(half.files().join("sub")).unwrap();
    std::mem::forget(half);
    drop(layers);
    let at = |name: &str| root.path().join("layers").join(Digest::of(name.as_bytes()).short());
    std::fs::write(at("torn").join("complete"), "{\"diff").unwrap();
    std::fs::rename(at("other"), root.path().join("layers/0123456789abcdef")).unwrap();
    let layers = Arc::new(Layers::open(root.path()).unwrap());
    assert!(layers.lease(Digest::of(b"good")).is_some());
    assert!(layers.lease(Digest::of(b"torn")).is_none() && layers.lease(Digest::of(b"other")).is_none());
    assert_eq!(std::fs::read_dir(root.path().join("layers")).unwrap().count(), 1);
    assert_eq!(std::fs::read_dir(root.path().join("partial")).unwrap().count(), 0);
}

#[tokio::test]
async fn two_layers_with_a_common_digest_prefix_are_not_confused() {
    let root = tempfile::tempdir().unwrap();
    let layers = Arc::new(Layers::open(root.path()).unwrap());
    let first = add(&layers, "a").await;
    // A digest with the same prefix, which an attacker might find.
    let mut hex = first.diff_id().hex();
    hex.replace_range(63.., if hex.ends_with('0') { "1" } else { "0" });
    let twin: Digest = format!("sha256:{hex}").parse().unwrap();
    let made = layers
        .ensure(twin, &Source::local(), async || Ok::<_, LayerError>((layers.unpack_dir()?, unpacked(twin))))
        .await;
    assert!(matches!(made, Err(LayerError::Commit(_))));
    assert!(layers.path(&first.diff_id()).join("a").is_file());
    assert!(layers.lease(twin).is_none(), "the first layer is not used in its place");
}
