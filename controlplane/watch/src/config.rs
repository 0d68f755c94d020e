//! The configuration of a watch.

use std::time::Duration;

use coracle_backoff::Backoff;
use kube::api::{ListParams, WatchParams};

/// Default timeout of a watch request, in seconds.
const TIMEOUT_SECONDS: u32 = 290;
/// Default back-off after failures.
const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(10);
/// For watches of the control plane: timeout of a watch request in seconds, and first back-off after a failure.
const CONTROL_PLANE_TIMEOUT_SECONDS: u32 = 1500;
const CONTROL_PLANE_FIRST_BACKOFF: Duration = Duration::from_millis(20);
/// Maximum back-off while the server does not serve a kind, for watches of the control plane and of optional kinds.
const UNSERVED_MAX_BACKOFF: Duration = Duration::from_secs(300);
/// Objects of a page of a list, as in client-go.
const PAGE_SIZE: u32 = 500;
/// Objects of a page after an expired list. client-go uses no pages after an expired list.
const LARGE_PAGE_SIZE: u32 = 8000;
/// Maximum bytes of a page of a list. A larger page is requested again with fewer objects.
const PAGE_LIMIT: usize = 64 << 20;
/// Maximum bytes of an event. An object has at most 3 MiB in the API server's encoding.
const LINE_LIMIT: usize = 16 << 20;

/// The objects to watch, and the timing of the requests.
#[derive(Clone, Debug)]
pub struct Config {
    labels: Option<String>,
    fields: Option<String>,
    timeout: u32,
    pub(crate) backoff: Backoff,
    pub(crate) max_unserved_backoff: Duration,
    /// Whether the kind is optional: the client also works if the server does not serve the kind.
    pub(crate) is_optional: bool,
    /// Maximum objects of a page.
    page_size: u32,
    /// Maximum bytes of a page.
    pub(crate) page_limit: usize,
    /// Maximum bytes of a line of a watch.
    pub(crate) line_limit: usize,
}

impl Default for Config {
    /// All objects. A watch request takes 290 seconds. The back-off after failures grows from 0.1 to 10 seconds.
    fn default() -> Self {
        Self {
            labels: None,
            fields: None,
            timeout: TIMEOUT_SECONDS,
            backoff: Backoff::new(FIRST_BACKOFF, MAX_BACKOFF).with_jitter(),
            max_unserved_backoff: MAX_BACKOFF,
            is_optional: false,
            page_size: PAGE_SIZE,
            page_limit: PAGE_LIMIT,
            line_limit: LINE_LIMIT,
        }
    }
}

impl Config {
    /// Settings for watches of the control plane, whose API server is near. The timeout is long, so that an idle
    /// machine rarely wakes up. While the server does not serve a kind, the back-off grows to 5 minutes.
    #[must_use]
    pub fn control_plane() -> Self {
        Self::default()
            .timeout(CONTROL_PLANE_TIMEOUT_SECONDS)
            .backoff(CONTROL_PLANE_FIRST_BACKOFF, MAX_BACKOFF)
            .max_unserved_backoff(UNSERVED_MAX_BACKOFF)
    }

    /// Watches only objects that a label selector selects.
    #[must_use]
    pub fn labels(mut self, selector: &str) -> Self {
        self.labels = Some(selector.to_owned());
        self
    }

    /// Watches only objects that a field selector selects.
    #[must_use]
    pub fn fields(mut self, selector: &str) -> Self {
        self.fields = Some(selector.to_owned());
        self
    }

    /// Timeout of a watch request, in seconds. At the timeout the server ends the request, and the watch starts the
    /// next request.
    #[must_use]
    pub fn timeout(mut self, seconds: u32) -> Self {
        self.timeout = seconds;
        self
    }

    /// First and maximum back-off after failures. The watch adds jitter to each delay.
    #[must_use]
    pub fn backoff(mut self, first: Duration, max: Duration) -> Self {
        (self.backoff, self.max_unserved_backoff) = (Backoff::new(first, max).with_jitter(), max);
        self
    }

    /// Maximum back-off while the server does not serve the kind.
    #[must_use]
    pub fn max_unserved_backoff(mut self, max: Duration) -> Self {
        self.max_unserved_backoff = max;
        self
    }

    /// Marks the kind as optional. While the server does not serve the kind or forbids it, the back-off grows to 5
    /// minutes.
    #[must_use]
    pub fn optional(mut self) -> Self {
        (self.max_unserved_backoff, self.is_optional) = (UNSERVED_MAX_BACKOFF, true);
        self
    }

    /// The timeout of a watch request.
    pub(crate) fn watch_timeout(&self) -> Duration {
        Duration::from_secs(self.timeout.into())
    }

    /// Requests fewer objects in a page. Returns false if a page has only one object.
    pub(crate) fn shrink_pages(&mut self) -> bool {
        let can_shrink = self.page_size > 1;
        self.page_size = (self.page_size / 4).max(1);
        can_shrink
    }

    /// The next list has large pages: it needs fewer requests, so it is less likely to expire.
    pub(crate) fn use_large_pages(&mut self) {
        self.page_size = LARGE_PAGE_SIZE;
    }

    /// Doubles the size of pages after a complete list, up to the default. Large objects may have been deleted.
    pub(crate) fn restore_pages(&mut self) {
        self.page_size = self.page_size.saturating_mul(2).min(PAGE_SIZE);
    }

    pub(crate) fn list_params(&self, token: Option<String>) -> ListParams {
        ListParams {
            label_selector: self.labels.clone(),
            field_selector: self.fields.clone(),
            limit: Some(self.page_size),
            continue_token: token,
            ..ListParams::default()
        }
    }

    pub(crate) fn watch_params(&self) -> WatchParams {
        WatchParams {
            label_selector: self.labels.clone(),
            field_selector: self.fields.clone(),
            timeout: Some(self.timeout),
            ..WatchParams::default()
        }
    }
}
