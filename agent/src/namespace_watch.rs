//! The watch of namespaces, which cluster DNS and network policies share.
//!
//! The watch stores no namespaces. For a new follower, the watch lists the namespaces again, and all followers receive
//! this list. So the agent holds the labels of namespaces only in followers that use them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_watch::{Config, Error, Event};
use futures::stream::{self, BoxStream, StreamExt};
use k8s_openapi::api::core::v1::Namespace;
use kube::core::PartialObjectMeta;
use kube::{Api, Client};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// A namespace without its content.
pub(crate) type Metadata = PartialObjectMeta<Namespace>;
/// An event of the watch, or the error of a failed request.
pub(crate) type NamespaceEvent = Result<Event<Metadata>, Arc<Error>>;

/// The dependency of a follower on namespaces. It determines the time at which a failed request is repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// The follower works without namespaces. After a refusal, the watch is retried every five minutes.
    Optional,
    /// Pods wait for namespaces. A refused request is repeated within seconds.
    Required,
}

/// The shared watch of namespaces. It sends requests only for followers. Cheap to clone.
#[derive(Clone)]
pub(crate) struct NamespaceWatch {
    shared: Arc<Shared>,
}

struct Shared {
    client: Client,
    followers: Arc<Mutex<Followers>>,
    /// The task of the watch. It ends when the set is dropped.
    task: Mutex<JoinSet<()>>,
}

#[derive(Default)]
struct Followers {
    all: Vec<Follower>,
    /// Number of the newest task. Events of earlier tasks are dropped.
    newest: u64,
}

struct Follower {
    need: Need,
    events: mpsc::UnboundedSender<NamespaceEvent>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// === impl NamespaceWatch ===

impl NamespaceWatch {
    /// A watch that sends no request before it has a follower.
    pub(crate) fn new(client: Client) -> Self {
        Self { shared: Arc::new(Shared { client, followers: Arc::default(), task: Mutex::default() }) }
    }

    /// Adds a follower. The stream begins with a list of all namespaces. When another follower is added, the stream
    /// repeats the list from `Init`. The caller must be in a Tokio runtime.
    pub(crate) fn follow(&self, need: Need) -> BoxStream<'static, NamespaceEvent> {
        let (events, mut received) = mpsc::unbounded_channel();
        // The lock is held until the new task exists, so that tasks start in the order of their numbers.
        let mut task = lock(&self.shared.task);
        let number = {
            let mut followers = lock(&self.shared.followers);
            followers.all.push(Follower { need, events });
            followers.newest += 1;
            followers.newest
        };
        task.abort_all();
        while task.try_join_next().is_some() {}
        task.spawn(run(self.shared.client.clone(), Arc::clone(&self.shared.followers), number));
        stream::poll_fn(move |context| received.poll_recv(context)).boxed()
    }
}

// === impl Followers ===

impl Followers {
    /// The strongest need of the followers that still exist. `None` if there are none, or if a newer task serves them.
    fn need(&mut self, task: u64) -> Option<Need> {
        self.all.retain(|follower| !follower.events.is_closed());
        let is_served = self.newest == task && !self.all.is_empty();
        let is_required = self.all.iter().any(|follower| follower.need == Need::Required);
        is_served.then_some(if is_required { Need::Required } else { Need::Optional })
    }

    /// Sends an event of a task to all followers. Returns the result of [`need`](Self::need). If it is `None`, the
    /// event is not sent.
    fn send(&mut self, task: u64, event: &NamespaceEvent) -> Option<Need> {
        let need = self.need(task)?;
        for follower in &self.all {
            // A follower that no longer exists is removed at the next event.
            let _ = follower.events.send(event.clone());
        }
        Some(need)
    }
}

/// Watches namespaces. Ends when a newer task exists, or at the first event after the end of the last follower.
async fn run(client: Client, followers: Arc<Mutex<Followers>>, number: u64) {
    loop {
        let Some(need) = lock(&followers).need(number) else { return };
        let config = match need {
            Need::Optional => Config::default().optional(),
            Need::Required => Config::default(),
        };
        let mut events = coracle_watch::watch(Api::<Metadata>::all(client.clone()), config);
        while let Some(event) = events.next().await {
            let event = event.map_err(Arc::new);
            let Some(now) = lock(&followers).send(number, &event) else { return };
            // The need has changed, and it decides when the failed request is repeated. So the watch begins again.
            if event.is_err() && now != need {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use coracle_testing::until_yielding;
    use serde_json::json;

    use super::*;

    /// Counts the requests of a fake API server.
    #[derive(Clone, Default)]
    struct Requests {
        lists: Arc<AtomicUsize>,
        /// Watches without a response.
        open: Arc<AtomicUsize>,
    }

    /// An open watch. It ends when its request is dropped.
    struct Open(Arc<AtomicUsize>);

    impl Drop for Open {
        fn drop(&mut self) {
            self.0.fetch_sub(1, SeqCst);
        }
    }

    /// A client of an API server with the namespace `a`, whose watches have no events.
    fn counted(requests: &Requests) -> Client {
        type Response = Result<http::Response<kube::client::Body>, std::convert::Infallible>;
        let requests = requests.clone();
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let requests = requests.clone();
            async move {
                assert_eq!(request.uri().path(), "/api/v1/namespaces");
                if request.uri().query().is_some_and(|query| query.contains("watch=")) {
                    requests.open.fetch_add(1, SeqCst);
                    let _open = Open(requests.open);
                    return std::future::pending::<Response>().await;
                }
                requests.lists.fetch_add(1, SeqCst);
                let list = json!({"metadata": {"resourceVersion": "7"},
                    "items": [{"metadata": {"name": "a", "labels": {"team": "x"}}}]});
                Response::Ok(http::Response::new(kube::client::Body::from(list.to_string().into_bytes())))
            }
        });
        Client::new(service, "default")
    }

    /// The names of the next complete list.
    async fn listed(events: &mut BoxStream<'static, NamespaceEvent>) -> Vec<String> {
        let mut names = Vec::new();
        while let Some(event) = events.next().await {
            match event.unwrap() {
                Event::Init => names.clear(),
                Event::InitApply(namespace) => names.push(namespace.metadata.name.unwrap()),
                Event::InitDone => break,
                other => panic!("{other:?}"),
            }
        }
        names
    }

    #[tokio::test]
    async fn all_followers_of_namespaces_share_one_watch() {
        let requests = Requests::default();
        let watch = NamespaceWatch::new(counted(&requests));
        let counts = || (requests.lists.load(SeqCst), requests.open.load(SeqCst));
        assert_eq!(counts(), (0, 0), "nothing is watched without a follower");
        let mut dns = watch.follow(Need::Optional);
        assert_eq!(listed(&mut dns).await, ["a"]);
        until_yielding("a watch", 10, || counts() == (1, 1)).await;
        let mut policies = watch.clone().follow(Need::Required);
        assert_eq!(listed(&mut policies).await, ["a"]);
        assert_eq!(listed(&mut dns).await, ["a"], "the list is for all");
        until_yielding("one watch for both", 10, || counts() == (2, 1)).await;
        drop(watch);
        until_yielding("the end of the watch", 10, || counts() == (2, 0)).await;
    }

    #[test]
    fn the_strongest_need_decides_and_an_earlier_task_sends_nothing() {
        let mut followers = Followers::default();
        assert_eq!(followers.need(0), None, "there is no follower");
        let add = |followers: &mut Followers, need| {
            let (events, received) = mpsc::unbounded_channel();
            followers.all.push(Follower { need, events });
            followers.newest += 1;
            received
        };
        let mut dns = add(&mut followers, Need::Optional);
        assert_eq!(followers.need(1), Some(Need::Optional));
        let policies = add(&mut followers, Need::Required);
        assert_eq!(followers.need(2), Some(Need::Required));
        assert_eq!(followers.send(1, &Ok(Event::InitDone)), None, "an earlier task");
        assert!(dns.try_recv().is_err());
        assert_eq!(followers.send(2, &Ok(Event::InitDone)), Some(Need::Required));
        assert!(dns.try_recv().is_ok());
        drop(policies);
        assert_eq!(followers.need(2), Some(Need::Optional), "the last policy was deleted");
        drop(dns);
        assert_eq!(followers.need(2), None);
    }
}
