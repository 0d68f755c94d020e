//! `/statusz` and `/flagz`: the state and the settings of this process.

use std::collections::BTreeMap;

use coracle_values::component_page::{self, MEDIA_TYPES, Page, Status};
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use jiff::Timestamp;

use super::respond::{text, typed};
use crate::runtime::Body;
use crate::version::KUBELET_VERSION;

/// The name of the component, as upstream.
const COMPONENT: &str = "kubelet";
/// Kubernetes version that the kubelet API corresponds to.
const EMULATED: &str = "1.36";
/// The paths that `/statusz` lists, by their first components.
#[rustfmt::skip]
const LISTED: &[&str] = &[
    "/attach", "/checkpoint", "/configz", "/containerLogs", "/exec", "/flagz", "/healthz", "/logs", "/metrics", "/pods",
    "/portForward", "/runningpods", "/stats",
];

/// Content of the pages.
#[derive(Debug)]
pub struct ComponentPages {
    started: Timestamp,
    flags: BTreeMap<String, String>,
}

// === impl ComponentPages ===

impl ComponentPages {
    /// The pages of an agent that starts now. `flags` has the settings in effect.
    #[must_use]
    pub fn new(flags: BTreeMap<String, String>) -> Self {
        Self { started: Timestamp::now(), flags }
    }

    pub(super) fn statusz(&self, headers: &HeaderMap) -> Response<Body> {
        let status = Status {
            component: COMPONENT,
            started: self.started,
            now: Timestamp::now(),
            version: KUBELET_VERSION.trim_start_matches('v'),
            emulated: EMULATED,
            paths: LISTED,
        };
        respond(component_page::statusz(&accepted(headers), &status))
    }

    pub(super) fn flagz(&self, headers: &HeaderMap) -> Response<Body> {
        respond(component_page::flagz(&accepted(headers), COMPONENT, &self.flags))
    }
}

/// All values of the header Accept.
fn accepted(headers: &HeaderMap) -> String {
    let values = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    values.collect::<Vec<_>>().join(",")
}

fn respond(page: Option<Page>) -> Response<Body> {
    let Some(page) = page else {
        let types = format!("only the following media types are accepted: {MEDIA_TYPES}");
        return text(StatusCode::NOT_ACCEPTABLE, types);
    };
    let mut response = typed(StatusCode::OK, page.media, page.body.into());
    let warning = page.warning.and_then(|text| HeaderValue::from_str(&format!("299 - \"{text}\"")).ok());
    if let Some(warning) = warning {
        response.headers_mut().insert(header::WARNING, warning);
    }
    response
}
