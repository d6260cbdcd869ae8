//! Collectives on serializable objects: small values that are not tensors.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::group::Group;
use crate::site::Site;
use crate::{Error, Result};

impl Group {
    /// Returns the objects of all ranks, in rank order, on every rank. Objects travel as JSON, so use it for metadata, not for
    /// large data.
    ///
    /// ```
    /// use dtensor_comm::launch;
    /// # fn main() -> dtensor_comm::Result<()> {
    /// launch(2, |world| {
    ///     let names = world.group().all_gather_object(&format!("rank {}", world.rank()))?;
    ///     assert_eq!(names, ["rank 0", "rank 1"]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(&self, object: &T) -> Result<Vec<T>> {
        const OP: &str = "all_gather_object";
        let bytes = serde_json::to_vec(object).map_err(|error| Error::argument(OP, error.to_string()))?;
        let all = self.exchange(bytes, Site::caller())?;
        all.iter().enumerate().map(|(rank, bytes)| deserialize(OP, rank, bytes)).collect()
    }

    /// Returns the object of rank `src` on every rank. Rank `src` must pass an object, and the others must pass `None`.
    ///
    /// ```
    /// use dtensor_comm::launch;
    /// # fn main() -> dtensor_comm::Result<()> {
    /// launch(2, |world| {
    ///     let steps = (world.rank() == 0).then_some(100);
    ///     let steps: u32 = world.group().broadcast_object(steps.as_ref(), 0)?;
    ///     assert_eq!(steps, 100);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn broadcast_object<T: Serialize + DeserializeOwned>(
        &self,
        object: Option<&T>,
        src: usize,
    ) -> Result<T> {
        const OP: &str = "broadcast_object";
        if src >= self.size() {
            let message = format!("rank {src} is not in the group, which has {}", self.size());
            return Err(Error::argument(OP, message));
        }
        let bytes = match object {
            Some(object) if self.rank() == src => serde_json::to_vec(object),
            None if self.rank() != src => Ok(Vec::new()),
            _ => {
                return Err(Error::argument(
                    OP,
                    format!("rank {src} must pass an object, and the other ranks must pass `None`"),
                ));
            }
        };
        let bytes = bytes.map_err(|error| Error::argument(OP, error.to_string()))?;
        let all = self.exchange(bytes, Site::caller())?;
        if all[src].is_empty() {
            return Err(Error::argument(
                OP,
                format!("rank {src} sent no object: it is simulated, or it was called with another `src`"),
            ));
        }
        deserialize(OP, src, &all[src])
    }
}

fn deserialize<T: DeserializeOwned>(op: &'static str, rank: usize, bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes)
        .map_err(|error| Error::argument(op, format!("rank {rank} sent an object of another type: {error}")))
}
