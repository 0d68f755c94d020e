//! The names of all namespaces. Cluster DNS answers the name of an existing namespace without an error.

use std::collections::HashSet;

use futures::StreamExt;

use super::{Event, ServiceCache};
use crate::namespace_watch::{Metadata, Need};

// === impl ServiceCache ===

impl ServiceCache {
    /// Keeps the names of all namespaces in the tables, until dropped. It begins after the first list of services,
    /// because pods wait for services and not for namespaces. A node may lack the right to read namespaces. Then the
    /// watch is retried every five minutes, or within seconds while network policies need it. Until the first list,
    /// only namespaces with services are known.
    pub(crate) async fn watch_namespaces(self) {
        let mut progress = self.changes();
        if progress.wait_for(|progress| progress.listed).await.is_err() {
            return;
        }
        let mut events = self.shared.namespaces.follow(Need::Optional);
        let mut listed = HashSet::new();
        while let Some(event) = events.next().await {
            match event {
                Ok(event) => self.apply_namespace_event(event, &mut listed),
                Err(error) => {
                    let error = &*error as &dyn std::error::Error;
                    tracing::debug!(error, kind = "namespaces", "a watch failed");
                }
            }
        }
    }

    fn apply_namespace_event(&self, event: Event<Metadata>, listed: &mut HashSet<String>) {
        match event {
            Event::Init => listed.clear(),
            Event::InitApply(namespace) => {
                listed.insert(name(namespace));
            }
            Event::InitDone => self.write(|tables| tables.replace_namespaces(std::mem::take(listed))),
            Event::Apply(namespace) => self.write(|tables| tables.put_namespace(name(namespace))),
            Event::Delete(namespace) => self.write(|tables| tables.remove_namespace(&name(namespace))),
        }
    }
}

fn name(namespace: Metadata) -> String {
    namespace.metadata.name.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::api_health::ApiHealth;
    use crate::checkpoint::Checkpoint;

    fn namespace(name: &str) -> Metadata {
        serde_json::from_value(json!({"metadata": {"name": name}})).unwrap()
    }

    #[tokio::test]
    async fn the_tables_follow_the_namespaces() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path();
        let checkpoint = Checkpoint::open(&path.join("agent"), &path.join("sealing.key")).unwrap();
        let cache = ServiceCache::new(crate::client::silent(), checkpoint, ApiHealth::default());
        let mut listed = HashSet::new();
        let mut after = |event| {
            cache.apply_namespace_event(event, &mut listed);
            ["a", "b"].map(|name| cache.read(|tables| tables.has_namespace(name)))
        };
        assert_eq!(after(Event::Init), [false, false]);
        assert_eq!(after(Event::InitApply(namespace("a"))), [false, false], "the list is not complete");
        assert_eq!(after(Event::InitDone), [true, false]);
        assert_eq!(after(Event::Apply(namespace("b"))), [true, true]);
        assert_eq!(after(Event::Delete(namespace("a"))), [false, true]);
        assert_eq!(after(Event::Init), [false, true], "another list");
        assert_eq!(after(Event::InitDone), [false, false], "a list replaces all");
    }
}
