//! Security profiles shared by sandboxes and containers: the default AppArmor profile and compiled seccomp filters.

use coracle_proto::cri;
use oci_spec::runtime::LinuxSeccomp;

use crate::container::apparmor::DefaultProfile;
use crate::container::confinement;
use crate::container::filter::Filters;
use crate::error::{self, Error};

/// The loaded default AppArmor profile and the cache of compiled seccomp filters.
#[derive(Default)]
pub(crate) struct SecurityProfiles {
    default_apparmor: DefaultProfile,
    filters: Filters,
}

// === impl SecurityProfiles ===

impl SecurityProfiles {
    /// Loads the default AppArmor profile into the kernel, if the security context needs it.
    pub(crate) async fn load_default_apparmor(
        &self,
        security: &cri::LinuxContainerSecurityContext,
    ) -> Result<(), Error> {
        if !confinement::wants_default(security) {
            return Ok(());
        }
        let loaded = self.default_apparmor.ensure().await;
        loaded.map_err(|source| Error::Kernel { doing: "load the default AppArmor profile", source })
    }

    /// Replaces the default AppArmor profile of an earlier process, so that running containers get the rules of this build.
    pub(crate) async fn replace_earlier_apparmor(&self) {
        self.default_apparmor.replace_earlier().await;
    }

    /// Compiles a seccomp profile to a BPF program. Without a profile the program is empty.
    pub(crate) async fn seccomp_program(&self, profile: Option<&LinuxSeccomp>) -> Result<Vec<u8>, Error> {
        let Some(profile) = profile else { return Ok(Vec::new()) };
        let program = self.filters.program(profile).await;
        let program = program.map_err(|why| Error::invalid("seccomp", error::chain(&why)))?;
        Ok(program.to_vec())
    }
}
