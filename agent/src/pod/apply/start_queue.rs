//! Start order of a pod's containers: by the arrival of their images, and by the spec among available images.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use futures::future::{FutureExt, MaybeDone, maybe_done};

use crate::pod::plan::StartContainer;
use crate::pod::pull::{Missing, Present, PullTask};

/// Time for which a container with an image waits for the containers before it in the spec. A lookup in the image store
/// takes less than a millisecond; a pull takes longer.
const LOOKUP_WAIT: Duration = Duration::from_millis(20);

/// Containers that wait for their images, in the order of the spec.
pub(super) struct StartQueue {
    waiting: Vec<(StartContainer, MaybeDone<PullTask>)>,
    /// Whether [`LOOKUP_WAIT`] has passed.
    looked: bool,
}

impl StartQueue {
    /// A queue of the containers that have a pull task.
    pub(super) fn new(starts: impl Iterator<Item = (StartContainer, Option<PullTask>)>) -> Self {
        Self {
            waiting: starts.filter_map(|(start, pull)| Some((start, maybe_done(pull?)))).collect(),
            looked: false,
        }
    }

    /// The next container to start. None after the last container. Cancel-safe: a container stays in the queue until it
    /// is returned.
    pub(super) async fn next(&mut self) -> Option<(StartContainer, Result<Present, Missing>)> {
        if self.waiting.is_empty() {
            return None;
        }
        let mut ready = self.first_ready(self.waiting.len()).await;
        if !self.looked {
            let before = tokio::time::timeout(LOOKUP_WAIT, async {
                while ready > 0 {
                    ready = self.first_ready(ready).await;
                }
            });
            // After a timeout, containers start in the order in which their images become available.
            let _late = before.await;
            self.looked = true;
        }
        let (start, mut pull) = self.waiting.remove(ready);
        Some((start, Pin::new(&mut pull).take_output()?))
    }

    /// Index of the first available container among the first `count`, as soon as there is one.
    async fn first_ready(&mut self, count: usize) -> usize {
        poll_fn(|context| {
            let mut pulls = self.waiting[..count].iter_mut();
            match pulls.position(|(_, pull)| pull.poll_unpin(context).is_ready()) {
                Some(at) => Poll::Ready(at),
                None => Poll::Pending,
            }
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use crate::pod::pull::shared;
    use crate::pod::security::ImageUser;

    use super::*;

    fn start(name: &str) -> StartContainer {
        StartContainer {
            name: name.to_owned(),
            attempt: 0,
            instead_of: None,
            crashed: None,
            pod_before: None,
        }
    }

    /// Start order of containers whose pulls take these times in milliseconds.
    async fn order(images: &[(&str, u64)]) -> Vec<String> {
        let pull = |(name, millis): &(&str, u64)| {
            let wait = Duration::from_millis(*millis);
            let pull = async move {
                tokio::time::sleep(wait).await;
                Ok(Present { id: String::new(), user: ImageUser { uid: None, name: String::new() } })
            };
            (start(name), Some(shared(tokio::spawn(pull))))
        };
        let mut queue = StartQueue::new(images.iter().map(pull));
        let mut order = Vec::new();
        while let Some((start, _)) = queue.next().await {
            order.push(start.name);
        }
        order
    }

    #[tokio::test(start_paused = true)]
    async fn a_container_waits_only_for_its_own_image() {
        assert_eq!(order(&[("a", 5000), ("b", 0), ("c", 100)]).await, ["b", "c", "a"]);
    }

    #[tokio::test(start_paused = true)]
    async fn containers_with_available_images_start_in_the_order_of_the_spec() {
        assert_eq!(order(&[("a", 3), ("b", 2), ("c", 1)]).await, ["a", "b", "c"]);
        assert_eq!(order(&[("a", 0), ("b", 0), ("c", 0)]).await, ["a", "b", "c"]);
    }
}
