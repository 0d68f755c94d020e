//! The description of one request on the pages below `/debug/api_priority_and_fairness`.

use std::sync::OnceLock;

use http::{Method, Uri};
use jiff::Timestamp;

use super::schema::Schema;
use crate::{
    authn::User,
    request::{RequestInfo, ResourceInfo},
};

/// A request that waits or runs.
#[derive(Debug)]
pub(crate) struct Note {
    /// Name of the flow schema of the request.
    pub(crate) schema: String,
    /// The flow distinguisher.
    pub(crate) flow: String,
    pub(crate) user: String,
    pub(crate) verb: &'static str,
    pub(crate) path: String,
    pub(crate) arrived: Timestamp,
    /// Time at which the request got its seats. Not set while the request waits.
    pub(crate) started: OnceLock<Timestamp>,
}

// === impl Note ===

impl Note {
    /// A request that arrives now.
    pub(crate) fn new(schema: &Schema, user: &User, info: &RequestInfo) -> Self {
        Self {
            schema: schema.name.clone(),
            flow: schema.flow(user, info).to_owned(),
            user: user.name.clone(),
            verb: info.verb,
            path: info.path.clone(),
            arrived: Timestamp::now(),
            started: OnceLock::new(),
        }
    }

    /// Records that the request has its seats now.
    pub(crate) fn start(&self) {
        let _is_first = self.started.set(Timestamp::now());
    }

    /// The resource in the path.
    pub(crate) fn resource(&self) -> Option<ResourceInfo> {
        let uri: Uri = self.path.parse().ok()?;
        RequestInfo::parse(&Method::GET, &uri).resource
    }
}
