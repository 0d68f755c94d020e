//! How the runtime finds its pods again.

use crate::error::Error;
use crate::runtime::Runtime;

impl Runtime {
    pub(crate) async fn recover(&self) -> Result<(), Error> {
        Ok(())
    }
}
