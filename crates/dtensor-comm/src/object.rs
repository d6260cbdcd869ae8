//! Small values that are not tensors, exchanged in a serialised form.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::group::Group;
use crate::site::Site;
use crate::{Error, Result};

impl Group {
    /// Every rank gets the objects of all, in rank order. For metadata: each is written as JSON.
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
        all.iter().enumerate().map(|(rank, bytes)| read(OP, rank, bytes)).collect()
    }

    /// Every rank gets the object of rank `src`, which alone gives one.
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
                    format!("rank {src} must give an object, and no other rank"),
                ));
            }
        };
        let bytes = bytes.map_err(|error| Error::argument(OP, error.to_string()))?;
        let all = self.exchange(bytes, Site::caller())?;
        if all[src].is_empty() {
            return Err(Error::argument(
                OP,
                format!("rank {src}, which is to give the object, is not there"),
            ));
        }
        read(OP, src, &all[src])
    }
}

fn read<T: DeserializeOwned>(op: &'static str, rank: usize, bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| {
        Error::argument(op, format!("what rank {rank} sent is not of the type that is wanted: {error}"))
    })
}
