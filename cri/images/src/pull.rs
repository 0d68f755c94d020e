//! Pulling an image: resolve, choose the platform, fetch and unpack what is missing, record.

use std::sync::Arc;

use crate::error::Error;
use crate::image::{Auth, Image, PullProgress};
use crate::images::Images;
use crate::reference::Reference;

/// Told how a pull goes; called from the task that awaits the pull.
pub type ProgressFn = Arc<dyn Fn(&PullProgress) + Send + Sync>;

impl Images {
    /// Pulls an image, or finds that what its name means at the registry is here already. Equal pulls at the same
    /// time are one; a pull that nobody awaits any more stops and leaves nothing half-done.
    ///
    /// # Errors
    /// See [`crate::ErrorKind`].
    pub async fn pull(
        &self,
        reference: &str,
        _auth: Option<Auth>,
        _progress: Option<ProgressFn>,
    ) -> Result<Image, Error> {
        let reference = Reference::parse(reference)?;
        Err(Error::UnknownImage { name: reference.to_string() })
    }
}
