//! Deletions of objects of kinds that no other controller watches.

use std::sync::OnceLock;

use kube::discovery::ApiResource;

type Listener = Box<dyn Fn(&ApiResource, &str) + Send + Sync>;

/// The deletions that the garbage collector observes. It watches the metadata of the objects of all kinds.
#[derive(Default)]
pub(crate) struct Deletions(OnceLock<Listener>);

impl Deletions {
    /// Sets the listener, which gets the resource and the namespace of each deleted object. There is one listener: a
    /// second one has no effect.
    pub(crate) fn listen(&self, listener: impl Fn(&ApiResource, &str) + Send + Sync + 'static) {
        drop(self.0.set(Box::new(listener)));
    }

    /// Calls the listener.
    pub(crate) fn notify(&self, resource: &ApiResource, namespace: &str) {
        if let Some(listener) = self.0.get() {
            listener(resource, namespace);
        }
    }
}
