//! The order in which containers of a pod start: by the arrival of their images, and by the spec among those whose images
//! are here.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use futures::future::{FutureExt, MaybeDone, maybe_done};

use crate::pod::plan::StartContainer;
use crate::pod::pull::{Missing, Present, PullTask};

/// Time for which the first container that could start waits for those before it in the spec: to find an image in the
/// store takes less than a millisecond, to pull one more.
const LOOK: Duration = Duration::from_millis(20);

/// Containers whose images are awaited, in the order of the spec.
pub(super) struct StartQueue {
    waiting: Vec<(StartContainer, MaybeDone<PullTask>)>,
    /// Whether the images that were here from the beginning had time to be found.
    looked: bool,
}

impl StartQueue {
    /// Containers without a pull are left out.
    pub(super) fn new(starts: impl Iterator<Item = (StartContainer, Option<PullTask>)>) -> Self {
        Self {
            waiting: starts.filter_map(|(start, pull)| Some((start, maybe_done(pull?)))).collect(),
            looked: false,
        }
    }

    /// The next container to start; nothing when all were returned. Cancel-safe: a container stays in the queue until it
    /// is returned.
    pub(super) async fn next(&mut self) -> Option<(StartContainer, Result<Present, Missing>)> {
        if self.waiting.is_empty() {
            return None;
        }
        let mut ready = self.first_ready(self.waiting.len()).await;
        if !self.looked {
            let before = tokio::time::timeout(LOOK, async {
                while ready > 0 {
                    ready = self.first_ready(ready).await;
                }
            });
            // When it takes longer, the order is that of arrival.
            let _late = before.await;
            self.looked = true;
        }
        let (start, mut pull) = self.waiting.remove(ready);
        Some((start, Pin::new(&mut pull).take_output()?))
    }

    /// Index of the first container among the first `count` whose image is here, as soon as there is one.
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
        StartContainer { name: name.to_owned(), attempt: 0, instead_of: None, crashed: None }
    }

    /// The order in which containers start, whose images take so many milliseconds.
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
    async fn a_container_waits_for_its_own_image_alone() {
        assert_eq!(order(&[("a", 5000), ("b", 0), ("c", 100)]).await, ["b", "c", "a"]);
    }

    #[tokio::test(start_paused = true)]
    async fn containers_whose_images_are_here_start_in_the_order_of_the_spec() {
        assert_eq!(order(&[("a", 3), ("b", 2), ("c", 1)]).await, ["a", "b", "c"]);
        assert_eq!(order(&[("a", 0), ("b", 0), ("c", 0)]).await, ["a", "b", "c"]);
    }
}
