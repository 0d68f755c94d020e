//! The process to which the path of a network namespace belongs.

use std::fmt;
use std::sync::Arc;

/// Whether the process of a path such as `/proc/42/ns/net` is alive. After its end, another process can get the pid,
/// and the path then leads to the namespace of that process.
#[derive(Clone)]
pub struct NamespaceProcess(Arc<dyn Fn() -> bool + Send + Sync>);

// === impl NamespaceProcess ===

impl NamespaceProcess {
    /// `is_alive` returns whether the process has not ended. It must identify the process by a pidfd, because a pid can
    /// be reused. It must not block.
    #[must_use]
    pub fn new(is_alive: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(is_alive))
    }

    /// Whether the process is alive. If it is, a path that was opened before this call led to its namespace.
    pub(super) fn is_alive(&self) -> bool {
        (self.0)()
    }
}

impl fmt::Debug for NamespaceProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NamespaceProcess").field("is_alive", &self.is_alive()).finish()
    }
}
