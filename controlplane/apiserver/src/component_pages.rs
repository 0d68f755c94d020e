//! `/statusz` and `/flagz`: the state and the settings of this server.

use std::collections::BTreeMap;

use coracle_values::component_page::{self, MEDIA_TYPES, Page, Status};
use http::HeaderMap;
use jiff::Timestamp;

use crate::{
    error::{ApiError, Result},
    media,
    reply::{self, Reply},
    version,
};

/// The name of the component, as upstream.
const COMPONENT: &str = "apiserver";
/// The first parts of the paths that `/statusz` lists. As upstream, `/statusz` lists only pages for troubleshooting.
const LISTED: [&str; 6] = ["/flagz", "/healthz", "/livez", "/metrics", "/readyz", "/version"];

/// The data that the pages show.
pub(crate) struct ComponentPages {
    started: Timestamp,
    flags: BTreeMap<String, String>,
}

// === impl ComponentPages ===

impl ComponentPages {
    /// The pages of a server that starts now. `flags` has the settings in effect.
    pub(crate) fn new(flags: BTreeMap<String, String>) -> Self {
        Self { started: Timestamp::now(), flags }
    }

    pub(crate) fn statusz(&self, headers: &HeaderMap) -> Result<Reply> {
        let status = Status {
            component: COMPONENT,
            started: self.started,
            now: Timestamp::now(),
            version: &version::own(),
            emulated: &version::emulated(),
            paths: &LISTED,
        };
        respond(component_page::statusz(&media::accepted(headers), &status))
    }

    pub(crate) fn flagz(&self, headers: &HeaderMap) -> Result<Reply> {
        respond(component_page::flagz(&media::accepted(headers), COMPONENT, &self.flags))
    }
}

fn respond(page: Option<Page>) -> Result<Reply> {
    let page = page.ok_or_else(|| ApiError::not_acceptable_as(MEDIA_TYPES))?;
    let warnings: Vec<String> = page.warning.map(str::to_owned).into_iter().collect();
    Ok(reply::warned(reply::bytes(200, page.media, page.body), &warnings))
}
