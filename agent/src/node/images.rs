//! Images in the Node object's status. The scheduler prefers nodes that have a pod's images.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use coracle_proto::cri;
use k8s_openapi::api::core::v1::ContainerImage;
use tokio::sync::watch;

use crate::runtime::Runtime;

/// Maximum names of an image in the status: the kubelet's `MaxNamesPerImageInNodeStatus`.
const MAX_NAMES_OF_IMAGE: usize = 5;
/// Period of lists with a runtime that sends no notifications.
const PERIOD: Duration = Duration::from_secs(60);
/// Delay of an update after a change. Images are added and removed in groups, and a group is one update.
const BATCH_DELAY: Duration = Duration::from_secs(1);

/// Keeps the list up to date until dropped. Lists the images again after each notification of the runtime, or
/// periodically. `max` is the maximum number of images in the list. None means no limit.
pub(crate) async fn keep(
    runtime: Arc<dyn Runtime>,
    mut changes: Option<watch::Receiver<()>>,
    list: watch::Sender<Option<Vec<ContainerImage>>>,
    max: Option<usize>,
) {
    loop {
        // A change during the list is noticed in the next iteration.
        changes.iter_mut().for_each(watch::Receiver::mark_unchanged);
        match runtime.list_images(cri::ListImagesRequest::default()).await {
            Ok(found) => {
                let reported = reported(found.images, max);
                list.send_if_modified(|known| {
                    let differs = known.as_ref() != Some(&reported);
                    if differs {
                        *known = Some(reported);
                    }
                    differs
                });
            }
            Err(status) => tracing::debug!(error = status.message(), "cannot list images"),
        }
        match &mut changes {
            Some(changes) => match changes.changed().await {
                Ok(()) => {}
                // The runtime has ended, and the agent ends soon.
                Err(_closed) => return std::future::pending().await,
            },
            None => tokio::time::sleep(PERIOD).await,
        }
        tokio::time::sleep(BATCH_DELAY).await;
    }
}

/// The `max` largest images, which are the most expensive to pull on another node.
fn reported(mut images: Vec<cri::Image>, max: Option<usize>) -> Vec<ContainerImage> {
    images.sort_by(|a, b| (Reverse(a.size), &a.id).cmp(&(Reverse(b.size), &b.id)));
    let reported = images.into_iter().take(max.unwrap_or(usize::MAX)).map(|image| {
        let names: Vec<String> =
            image.repo_digests.into_iter().chain(image.repo_tags).take(MAX_NAMES_OF_IMAGE).collect();
        ContainerImage {
            names: Some(names).filter(|names| !names.is_empty()),
            size_bytes: i64::try_from(image.size).ok(),
        }
    });
    reported.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(number: u64, digests: usize, tags: usize) -> cri::Image {
        cri::Image {
            id: format!("sha256:{number}"),
            repo_digests: (0..digests).map(|n| format!("r/{number}@sha256:{n}")).collect(),
            repo_tags: (0..tags).map(|n| format!("r/{number}:{n}")).collect(),
            size: number,
            ..cri::Image::default()
        }
    }

    #[test]
    fn the_largest_images_are_reported_with_some_of_their_names() {
        let images: Vec<_> = (0..60).map(|number| image(number, 2, 4)).collect();
        assert_eq!(reported(images.clone(), None).len(), 60);
        assert_eq!(reported(images.clone(), Some(0)).len(), 0);
        let all = reported(images, Some(50));
        assert_eq!((all.len(), all[0].size_bytes, all[49].size_bytes), (50, Some(59), Some(10)));
        let names = ["r/59@sha256:0", "r/59@sha256:1", "r/59:0", "r/59:1", "r/59:2"];
        assert_eq!(all[0].names.as_deref().unwrap(), names);
        assert_eq!(reported(vec![image(1, 0, 0)], None)[0].names, None);
    }
}
