//! Waits for the ends of containers. All log followers share one subscription to the runtime's events.
//!
//! An event has the status of its pod, with annotations of up to 256 KiB. If each follower had a subscription, a client
//! that does not read would make the agent keep the events of the whole node.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use coracle_proto::cri;
use futures::StreamExt;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use crate::runtime::{Events, Runtime};

/// The containers for whose ends log followers wait.
#[derive(Default)]
pub struct ContainerEnds {
    state: Mutex<State>,
    /// Held while a subscription begins.
    subscribing: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct State {
    /// Senders, by container id. A sender is dropped when its container ends.
    awaited: HashMap<String, watch::Sender<()>>,
    /// Reads the events while a container is awaited.
    task: Option<AbortOnDropHandle<()>>,
}

/// The end of one container.
pub(super) struct End {
    ends: Arc<ContainerEnds>,
    id: String,
    receiver: Option<watch::Receiver<()>>,
}

// === impl ContainerEnds ===

impl ContainerEnds {
    /// Registers for the end of a container after this call. `None` if the runtime sends no events.
    pub(super) async fn of(self: &Arc<Self>, runtime: &dyn Runtime, id: &str) -> Option<End> {
        let end = self.register(id);
        let _subscribing = self.subscribing.lock().await;
        if !self.is_listening() {
            self.listen(runtime.events().await.ok()?);
        }
        Some(end)
    }

    pub(super) fn register(self: &Arc<Self>, id: &str) -> End {
        let mut state = self.state();
        let sender = state.awaited.entry(id.to_owned()).or_insert_with(|| watch::channel(()).0);
        End { ends: Arc::clone(self), id: id.to_owned(), receiver: Some(sender.subscribe()) }
    }

    fn is_listening(&self) -> bool {
        self.state().task.as_ref().is_some_and(|task| !task.is_finished())
    }

    pub(super) fn listen(self: &Arc<Self>, events: Events) {
        let task = coracle_threads::spawn(read(Arc::downgrade(self), events));
        self.state().task = Some(AbortOnDropHandle::new(task));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends the wait for each container that ends. If the stream ends, all waits end.
async fn read(ends: Weak<ContainerEnds>, mut events: Events) {
    const STOPPED: i32 = cri::ContainerEventType::ContainerStoppedEvent as i32;
    const DELETED: i32 = cri::ContainerEventType::ContainerDeletedEvent as i32;
    loop {
        let event = events.next().await;
        let Some(ends) = ends.upgrade() else { return };
        match event {
            Some(Ok(event)) if !matches!(event.container_event_type, STOPPED | DELETED) => {}
            Some(Ok(event)) => drop(ends.state().awaited.remove(&event.container_id)),
            Some(Err(_)) | None => {
                let mut state = ends.state();
                state.awaited.clear();
                // The next follower subscribes.
                state.task = None;
                return;
            }
        }
    }
}

// === impl End ===

impl End {
    /// Waits for the end. Cancel-safe: a dropped sender ends later waits as well.
    pub(super) async fn wait(&mut self) {
        if let Some(receiver) = &mut self.receiver {
            while receiver.changed().await.is_ok() {}
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.receiver = None;
        let mut state = self.ends.state();
        if state.awaited.get(&self.id).is_some_and(|sender| sender.receiver_count() == 0) {
            state.awaited.remove(&self.id);
        }
        if state.awaited.is_empty() {
            state.task = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;
    use tokio_stream::wrappers::ReceiverStream;

    use super::*;

    fn event(id: &str, kind: cri::ContainerEventType) -> cri::ContainerEventResponse {
        cri::ContainerEventResponse {
            container_id: id.to_owned(),
            container_event_type: kind.into(),
            ..Default::default()
        }
    }

    #[tokio::test]
    async fn all_followers_share_one_subscription_that_ends_with_the_last() {
        use cri::ContainerEventType::{ContainerStartedEvent, ContainerStoppedEvent};
        let ends = Arc::<ContainerEnds>::default();
        let (sender, receiver) = mpsc::channel(1);
        let [mut one, mut same, mut other] = ["a", "a", "b"].map(|id| ends.register(id));
        ends.listen(ReceiverStream::new(receiver).boxed());
        for (id, kind) in
            [("b", ContainerStartedEvent), ("x", ContainerStoppedEvent), ("a", ContainerStoppedEvent)]
        {
            sender.send(Ok(event(id, kind))).await.expect("the events are read");
        }
        one.wait().await;
        same.wait().await;
        assert!(!other.receiver.as_ref().expect("awaited").has_changed().expect("it runs"));
        // A later follower of the same container is not affected by the end of an earlier follower.
        let again = ends.register("a");
        drop((one, same));
        assert_eq!(ends.state().awaited.len(), 2);
        drop(again);
        sender.send(Err(crate::runtime::RuntimeError::Unsupported(String::new()))).await.expect("read");
        other.wait().await;
        drop(other);
        assert!(ends.state().task.is_none() && ends.state().awaited.is_empty());
        sender.closed().await;
    }
}
